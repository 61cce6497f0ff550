"""Where a checkpoint keeps its state dict, and the prefixes that wrappers add to its keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import Tensor

from nfn_graph.converters.errors import ConversionError

#: Of DistributedDataParallel, of torch.compile, and of modules inside a LightningModule.
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.")

T = TypeVar("T")


def find_state_dict(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The mapping of keys to tensors in a checkpoint: itself, or the one inside."""
    if not isinstance(checkpoint, Mapping):
        raise ConversionError(
            f"Expected a state dict (got {type(checkpoint).__name__}). For a module, use "
            f"from_module"
        )
    if any(isinstance(value, Tensor) for value in checkpoint.values()):
        _check_values(checkpoint)
        return checkpoint
    inside = {
        name: value
        for name, value in checkpoint.items()
        if isinstance(value, Mapping)
        and value
        and all(isinstance(key, str) for key in value)
        and any(isinstance(tensor, Tensor) for tensor in value.values())
    }
    if "state_dict" in inside:
        inside = {"state_dict": inside["state_dict"]}
    if len(inside) != 1:
        raise ConversionError(
            f"Expected a state dict, or a checkpoint with one inside (got "
            f"{f'several: {list(inside)}; pass one of them' if inside else 'no tensors'})"
        )
    found: Mapping[str, Any] = next(iter(inside.values()))
    _check_values(found)
    return found


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
    if len(set(keys)) != len(keys) or not known.issuperset(keys):
        return dict(state_dict)
    return dict(zip(keys, state_dict.values(), strict=True))


def _check_values(state_dict: Mapping[str, Any]) -> None:
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise ConversionError(f"Expected keys of a state dict to be strings (got {key!r})")
        if not isinstance(value, Tensor | int | float | str | bytes | None):
            raise ConversionError(
                f"Expected '{key}' of a state dict to be a tensor (got {type(value).__name__})"
            )
