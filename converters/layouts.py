"""The layout of a state dict: followed from its network, or inferred as a chain; kept by shapes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph.converters.chain import Hints, chain_layout
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.prefixes import Keys
from nfn_graph.converters.pytorch import trace
from nfn_graph.converters.pytorch.wrappers import unwrapped_module
from nfn_graph.data import Layout

Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]

_MOST_CACHED = 64
_chains: dict[tuple[Signature, Hints], Layout] = {}
_archs: weakref.WeakKeyDictionary[nn.Module, dict[Any, Layout]] = weakref.WeakKeyDictionary()


def find_layout(
    state_dict: Mapping[str, Any], arch: nn.Module | None, hints: Hints, example_input: Any
) -> Layout:
    """The layout of a state dict; thousands of networks of one kind share it.

    Args:
        state_dict: Tensors by key; what is no tensor is passed over.
        arch: The network; without it, a chain is inferred.
        hints: What is known of the chain.
        example_input: An input of `arch`, where shapes decide.
    """
    signature = tuple(
        [(key, t.shape, t.dtype) for key, t in state_dict.items() if isinstance(t, Tensor)]
    )
    if arch is not None:
        arch = unwrapped_module(arch)
    known: dict[Any, Layout]
    name: Any
    if arch is None:
        _check_apart(state_dict)
        known, name = _chains, (signature, hints)
    else:
        known, name = _archs.setdefault(arch, {}), (signature, shapes_of(example_input))
    layout = known.get(name)
    if layout is None:
        tensors = {key: state_dict[key] for key, _, _ in signature}
        layout = (
            chain_layout(tensors, hints)
            if arch is None
            else _arch_layout(arch, tensors, example_input)
        )
        if len(known) >= _MOST_CACHED:
            known.clear()
        known[name] = layout
    return layout


def shapes_of(example: Any) -> Any:
    """What a layout depends on of an example input."""
    if isinstance(example, Tensor):
        return tuple(example.shape)
    if isinstance(example, (list, tuple)):
        return tuple(shapes_of(item) for item in example)
    return repr(example)


def _arch_layout(arch: nn.Module, tensors: Mapping[str, Tensor], example_input: Any) -> Layout:
    """The layout of a module for a checkpoint with its keys, perhaps behind a prefix."""
    expected = arch.state_dict()
    keys = Keys(tensors, expected)
    if not keys.fit:
        raise ConversionError(
            f"Expected the keys of {type(arch).__name__}, all behind one prefix (got a state dict "
            f"without {keys.missing[:5] or 'none of them missing'}, and with unknown "
            f"{keys.unknown[:5]})"
        )
    for key, own in keys.names.items():
        if tensors[own].shape != expected[key].shape:
            raise ConversionError(
                f"Expected '{own}' of shape {tuple(expected[key].shape)} as in "
                f"{type(arch).__name__} (got {tuple(tensors[own].shape)})"
            )
    layout = trace(arch, example_input)
    placements = []
    for p in layout.placements:
        names = tuple(keys.names[key] for key in p.keys)
        tensor = tensors[names[0]]
        if not tensor.is_floating_point():
            raise ConversionError(
                f"Expected floating-point weights (got '{names[0]}' of {tensor.dtype})"
            )
        placements.append(replace(p, keys=names, dtype=tensor.dtype))
    return replace(layout, placements=tuple(placements), carried={}, keys=())


def _check_apart(tensors: Mapping[str, Any]) -> None:
    """Without a module, nobody knows whether a shared tensor is used once or twice."""
    seen: dict[int, str] = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dim() > 1 and not tensor.is_meta:
            first = seen.setdefault(tensor.data_ptr(), key)
            if first != key:
                raise ConversionError(
                    f"Expected tensors of their own (got '{first}' and '{key}' in the same "
                    f"memory: one layer under two names, or one weight used twice). Give the "
                    f"network as arch"
                )
