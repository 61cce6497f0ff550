"""Finds the state dict in a checkpoint, and matches its keys to those of a network."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.npz import from_array
from nfn_graph.converters.pytorch.tensors import unwrapped_module


def is_numeric(value: Any) -> bool:
    """Whether a value is a tensor or an array."""
    return isinstance(value, (Tensor, np.ndarray))


def is_plain(value: Any) -> bool:
    """Whether a value is a dense tensor of plain numbers."""
    is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
    return is_tensor and not (value.is_quantized or value.is_nested)


def as_tensor(what: str, value: Any) -> Any:
    """Converts an array to a tensor, over its memory if possible; returns other values as is."""
    if isinstance(value, np.ndarray):
        return from_array(what, value)
    if not isinstance(value, Tensor) or is_plain(value):
        return value
    got = (
        "a nested tensor"
        if value.is_nested
        else f"the quantised type {value.dtype}; call dequantize()"
    )
    if value.layout != torch.strided and not value.is_nested:
        got = f"the layout {value.layout}; call to_dense()"
    raise ConversionError(f"Expected a dense tensor of numbers as {what} (got {got})")


#: Prefixes of DistributedDataParallel, of torch.compile, and of modules inside a LightningModule.
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")

# torch.compile may also wrap a part of a network.
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")


class Keys:
    """The keys of a checkpoint matched to the keys of a network.

    The keys of the checkpoint are those of the network behind one prefix: the prefix of a wrapper,
    or that of an attribute of a larger module. Tensors with another prefix do not belong to the
    network.

    Args:
        keys: The keys of the checkpoint.
        wanted: The keys of the network.

    Attributes:
        names: The key in the checkpoint for each key of the network that was found.
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
                f"the tensors of only one of them"
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
        """Whether the checkpoint has all keys of the network and no others."""
        return not self.missing and not self.unknown


def _plain(key: str) -> str:
    return _COMPILED.sub("", key)


# The names under which programs save the weights beside other things, the most usual first.
_PLACES = ("state_dict", "model_state_dict", "model")

_DEEPEST = 3

# The values that a state dict may hold; all of them except tensors are carried along.
_VALUES = (Tensor, np.generic, int, float, str, bytes)


def find_state_dict(
    checkpoint: Mapping[str, Any], key: str | None = None, arch: nn.Module | None = None
) -> Mapping[str, Any]:
    """Finds the mapping of keys to tensors in a checkpoint, which may be the checkpoint itself.

    A mapping under one of the usual names takes precedence over everything beside it. Arrays are
    converted to tensors.

    Args:
        checkpoint: A state dict, or a larger object that contains it.
        key: The network to choose if there are several: the name of a mapping, or a prefix of keys.
        arch: The network, which may fit only one of several.
    """
    if not isinstance(checkpoint, Mapping):
        raise ConversionError(
            f"Expected a state dict (got {type(checkpoint).__name__}). For a module, use "
            f"from_module"
        )
    if key is not None:
        return find_state_dict(_chosen(checkpoint, key), arch=arch)
    found = _usual(checkpoint)
    if found is None and any(isinstance(value, Tensor) for value in checkpoint.values()):
        found = checkpoint
    inside = _networks(checkpoint)
    if arch is not None and len(inside) > 1:
        fitting = [tensors for tensors in inside.values() if _fits(tensors, arch)]
        found = fitting[0] if len(fitting) == 1 else found
    if found is None and len(inside) < 2:
        found = next(iter(inside.values()), None)
        if found is None and any(map(is_numeric, checkpoint.values())):
            found = checkpoint
    if found is None:
        got = "no tensors)"
        if inside:
            first = next(iter(inside))
            got = f"several: {list(inside)}). Choose one with key={first!r}"
        raise ConversionError(f"Expected a state dict, or a checkpoint with one inside (got {got}")
    return _checked(found)


def _chosen(checkpoint: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the part of a checkpoint that a key names, also below one of the usual names."""
    for place in (checkpoint, _usual(checkpoint) or {}):
        networks = _networks(place)
        if key in networks:
            return networks[key]
        prefixed = {name: x for name, x in place.items() if str(name).startswith(f"{key}.")}
        if any(map(is_numeric, prefixed.values())):
            return prefixed
    names = [*_networks(checkpoint), *_prefixes(_usual(checkpoint) or checkpoint)]
    raise ConversionError(
        f"Expected key to name a network in the checkpoint (got {key!r}; available: {names})"
    )


def _prefixes(state_dict: Mapping[Any, Any]) -> list[str]:
    names = (str(name).partition(".") for name, x in state_dict.items() if is_numeric(x))
    return list(dict.fromkeys(first for first, dot, _ in names if dot))


def _networks(checkpoint: Mapping[Any, Any], depth: int = 0) -> dict[str, Mapping[str, Any]]:
    """Returns the state dicts in a checkpoint by name; those in a list by name and number.

    They may be together in a mapping with one of the usual names.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for name, value in checkpoint.items():
        several = value if isinstance(value, (list, tuple)) and len(value) > 1 else ()
        numbered = {f"{name}.{i}": item for i, item in enumerate(several)}
        for own, item in (numbered or {str(name): value}).items():
            if (inside := _inside(item)) is not None:
                found[own] = inside
            elif name in _PLACES and isinstance(item, Mapping) and depth < _DEEPEST:
                deeper = _networks(item, depth + 1)
                found |= {f"{own}.{key}": network for key, network in deeper.items()}
    return found


def _fits(tensors: Mapping[str, Any], arch: nn.Module) -> bool:
    """Whether tensors have the keys and sizes of a network."""
    own = unwrapped_module(arch).state_dict()
    try:
        keys = Keys((k for k, x in tensors.items() if is_numeric(x)), own)
    except ConversionError:
        return False
    return keys.fit and all(
        math.prod(tensors[k].shape) == own[name].numel() for name, k in keys.names.items()
    )


def _usual(checkpoint: Mapping[Any, Any], depth: int = 0) -> Mapping[str, Any] | None:
    """Returns the state dict under one of the usual names, which may be nested."""
    places = (_inside(checkpoint[name], depth) for name in _PLACES if name in checkpoint)
    return next((found for found in places if found is not None), None)


def _inside(value: Any, depth: int = 0) -> Mapping[str, Any] | None:
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, Mapping):
        return None
    if all(isinstance(key, str) for key in value) and any(map(is_numeric, value.values())):
        return value
    return _usual(value, depth + 1) if depth < _DEEPEST else None


def _checked(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Checks keys and values, and converts arrays to tensors."""
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
