"""Where a checkpoint keeps its state dict, and the prefixes that wrappers add to its keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor

from nfn_graph.converters.checkpoint_values import as_tensor, is_numeric, is_plain
from nfn_graph.converters.errors import ConversionError

#: Of DistributedDataParallel, of torch.compile, and of modules inside a LightningModule.
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")

# Where programs that save more than the weights keep them, the usual place first.
_PLACES = ("state_dict", "model_state_dict", "model")

_DEEPEST = 3

# What a state dict may hold; all but the tensors is carried along.
_VALUES = (Tensor, int, float, str, bytes)

# torch.compile may wrap a part of a network, too.
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


def find_state_dict(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of keys to tensors in a checkpoint: the one inside, or itself.

    A mapping under one of the usual names comes first, whatever lies beside it. Arrays become
    tensors.
    """
    if not isinstance(checkpoint, Mapping):
        raise ConversionError(
            f"Expected a state dict (got {type(checkpoint).__name__}). For a module, use "
            f"from_module"
        )
    found = _usual(checkpoint)
    inside: dict[str, Any] = {}
    if found is None and any(isinstance(value, Tensor) for value in checkpoint.values()):
        found = checkpoint
    elif found is None:
        candidates = {name: _inside(value) for name, value in checkpoint.items()}
        inside = {name: value for name, value in candidates.items() if value is not None}
        found = next(iter(inside.values())) if len(inside) == 1 else None
        if not inside and any(map(is_numeric, checkpoint.values())):
            found = checkpoint
    if found is None:
        raise ConversionError(
            f"Expected a state dict, or a checkpoint with one inside (got "
            f"{f'several: {list(inside)}; pass one of them' if inside else 'no tensors'})"
        )
    return _checked(found)


def _usual(checkpoint: Mapping[Any, Any], depth: int = 0) -> Mapping[str, Any] | None:
    """What lies under one of the usual names, also inside one another."""
    places = (_inside(checkpoint[name], depth) for name in _PLACES if name in checkpoint)
    return next((found for found in places if found is not None), None)


def _inside(value: Any, depth: int = 0) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    if all(isinstance(key, str) for key in value) and any(map(is_numeric, value.values())):
        return value
    return _usual(value, depth + 1) if depth < _DEEPEST else None


class Keys:
    """The keys of a checkpoint that those of a network stand for.

    They are the same behind one prefix: that of a wrapper, or of the attribute of a larger module.
    What has another prefix lies beside the network.

    Args:
        keys: The keys of the checkpoint.
        wanted: The keys of the network.

    Attributes:
        names: The checkpoint's key for every key of the network that it has.
        missing: Keys of the network that the checkpoint does not have.
        unknown: Keys of the checkpoint, behind the prefix, that the network does not have.
    """

    def __init__(self, keys: Iterable[str], wanted: Collection[str]) -> None:
        plain = {_plain(key): key for key in wanted}
        found: Counter[str] = Counter()
        by_plain: dict[str, list[str]] = {}
        for key in keys:
            name = _plain(key)
            by_plain.setdefault(name, []).append(key)
            starts = [0, *(match.end() for match in re.finditer(r"\.", name))]
            found.update({name[:start] for start in starts if name[start:] in plain})
        complete = [prefix for prefix, count in found.items() if count >= len(plain)]
        if len(complete) > 1:
            shown = " and ".join(repr(prefix) for prefix in sorted(complete)[:3])
            raise ConversionError(
                f"Expected the network's keys behind one prefix (got them behind {shown}). Pass "
                f"the tensors of one of them"
            )
        prefix = complete[0] if complete else max(found, key=lambda p: found[p], default="")
        self.names: dict[str, str] = {}
        self.unknown: list[str] = []
        for name, own in by_plain.items():
            if not name.startswith(prefix):
                continue
            if len(own) > 1:
                raise ConversionError(
                    f"Expected one tensor for '{name}' (got '{own[0]}' and '{own[1]}', which are "
                    f"the same without the prefix of a wrapper). Delete one of them"
                )
            if name[len(prefix) :] in plain:
                self.names[plain[name[len(prefix) :]]] = own[0]
            else:
                self.unknown.append(own[0])
        self.missing = [key for key in wanted if key not in self.names]

    @property
    def fit(self) -> bool:
        """Whether the network has these keys, all of them and no others."""
        return not self.missing and not self.unknown


def _plain(key: str) -> str:
    return _COMPILED.sub("", key)


def _checked(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same with arrays as tensors."""
    changed: dict[str, Any] = {}
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise ConversionError(f"Expected keys of a state dict to be strings (got {key!r})")
        if is_plain(value):
            continue
        tensor = as_tensor(f"'{key}' of a state dict", value)
        if tensor is not value:
            changed[key] = tensor
        elif value is not None and not isinstance(value, _VALUES):
            raise ConversionError(
                f"Expected '{key}' of a state dict to be a tensor (got {type(value).__name__})"
            )
    return {**state_dict, **changed} if changed else state_dict
