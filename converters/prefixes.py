"""Where a checkpoint keeps its state dict, and the prefixes that wrappers add to its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor

from nfn_graph.converters.errors import ConversionError

#: Of DistributedDataParallel, of torch.compile, and of modules inside a LightningModule.
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")

# Where programs that save more than the weights keep them, the usual place first.
_PLACES = ("state_dict", "model_state_dict", "model")

# What a state dict may hold; all but the tensors is carried along.
_VALUES = (Tensor, int, float, str, bytes)

T = TypeVar("T")


def find_state_dict(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of keys to tensors in a checkpoint: the one inside, or itself.

    A mapping under one of the usual names comes first, whatever lies beside it.
    """
    if not isinstance(checkpoint, Mapping):
        raise ConversionError(
            f"Expected a state dict (got {type(checkpoint).__name__}). For a module, use "
            f"from_module"
        )
    usual = (checkpoint[name] for name in _PLACES if name in checkpoint)
    found = next(filter(_has_tensors, usual), None)
    inside: dict[str, Any] = {}
    if found is None and any(isinstance(value, Tensor) for value in checkpoint.values()):
        found = checkpoint
    elif found is None:
        inside = {name: value for name, value in checkpoint.items() if _has_tensors(value)}
        found = next(iter(inside.values())) if len(inside) == 1 else None
    if found is None:
        raise ConversionError(
            f"Expected a state dict, or a checkpoint with one inside (got "
            f"{f'several: {list(inside)}; pass one of them' if inside else 'no tensors'})"
        )
    _check_values(found)
    return found


def _has_tensors(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and all(isinstance(key, str) for key in value)
        and any(isinstance(tensor, Tensor) for tensor in value.values())
    )


def strip_prefixes(state_dict: Mapping[str, T], wanted: Collection[str]) -> dict[str, T]:
    """The same with the prefixes of wrappers removed, if that makes the keys the wanted ones."""
    keys = list(state_dict)
    known = set(wanted)
    while keys and not known.issuperset(keys):
        prefix = next((p for p in PREFIXES if all(key.startswith(p) for key in keys)), None)
        if prefix is None:
            break
        keys = [key.removeprefix(prefix) for key in keys]
    if not known.issuperset(keys):
        # torch.compile may wrap a part of a network, too.
        keys = [key.replace("_orig_mod.", "") for key in state_dict]
    if not known.issuperset(keys):
        return dict(state_dict)
    named: dict[str, str] = {}
    for key, own in zip(keys, state_dict, strict=True):
        if key in named:
            raise ConversionError(
                f"Expected one tensor for '{key}' (got '{named[key]}' and '{own}', which are "
                f"the same without the prefix of a wrapper). Delete one of them"
            )
        named[key] = own
    return {key: state_dict[own] for key, own in named.items()}


def _check_values(state_dict: Mapping[str, Any]) -> None:
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise ConversionError(f"Expected keys of a state dict to be strings (got {key!r})")
        if value is not None and not isinstance(value, _VALUES):
            raise ConversionError(
                f"Expected '{key}' of a state dict to be a tensor (got {type(value).__name__})"
            )
