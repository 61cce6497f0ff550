"""Finds the layout of a state dict, from its network or as a chain, and caches it by shapes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nfn_graph import WeightGraph
from nfn_graph.converters.chain import ASK_FOR_ARCH, Hints, read_chain
from nfn_graph.converters.checkpoint import Keys
from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.families import Heads, family_network, find_family, is_named, may_share
from nfn_graph.converters.pytorch import trace
from nfn_graph.converters.pytorch.tensors import unwrapped_module
from nfn_graph.data import Computation, Layout
from nfn_graph.messages import UserError

Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]

_MOST_CACHED = 64
# Most tensors already differ in their first few entries.
_FIRST_ENTRIES = 4
_chains: dict[tuple[Signature, Hints, Heads | None], Layout] = {}
_archs: weakref.WeakKeyDictionary[nn.Module, dict[Any, Layout]] = weakref.WeakKeyDictionary()


def layout_of(graph: WeightGraph) -> Layout:
    """Returns the layout of a graph of one network."""
    if not isinstance(graph, WeightGraph):
        raise TypeError(f"Expected a WeightGraph (got {type(graph).__name__})")
    layouts = graph.layouts
    if len(layouts) != 1 or graph.layout is not layouts[0]:
        raise UserError("Expected one network (got a batch; take batch[i] of it)")
    return layouts[0]


def find_layout(
    state_dict: Mapping[str, Any],
    arch: nn.Module | None,
    hints: Hints,
    example_input: Any,
    heads: Heads | None = None,
) -> Layout:
    """Finds the layout of a state dict. Thousands of networks of one kind share a cached layout.

    Args:
        state_dict: Tensors by key; other values are ignored.
        arch: The network; without it, a chain is inferred.
        hints: What is known about the chain.
        example_input: An input of `arch`, if the layout depends on shapes.
        heads: The number of attention heads of a well-known transformer, if known.
    """
    signature = tuple(
        [(key, t.shape, t.dtype) for key, t in state_dict.items() if isinstance(t, Tensor)]
    )
    if arch is not None:
        arch = unwrapped_module(arch)
    known: dict[Any, Layout]
    name: Any
    is_family = arch is None and is_named(tuple(key for key, _, _ in signature))
    if arch is None:
        if not is_family:
            _check_apart(state_dict, is_family)
        known, name = _chains, (signature, hints, heads)
    else:
        known, name = _archs.setdefault(arch, {}), (signature, shapes_of(example_input))
    layout = known.get(name)
    if layout is None:
        tensors = {key: state_dict[key] for key, _, _ in signature}
        layout = (
            _named_layout(tensors, hints, heads)
            if arch is None
            else _arch_layout(arch, tensors, example_input)
        )
        if len(known) >= _MOST_CACHED:
            known.clear()
        known[name] = layout
    if is_family:
        _check_apart(state_dict, is_family)
    return layout


def _named_layout(tensors: Mapping[str, Tensor], hints: Hints, heads: Heads | None) -> Layout:
    """Infers a layout from names and shapes, as a well-known transformer or a chain."""
    family = find_family(tensors, heads)
    if family is None or heads is None:
        return read_chain(tensors, hints)
    network, example = family_network(family, tensors, heads)
    layout = _arch_layout(network, tensors, example)
    known = {key for own in family.names.values() for key in own.values()}
    if unused := sorted(known - layout.placed):
        raise ConversionError(
            f"Expected tensors that {family.family.name} computes with (got '{unused[0]}', which "
            f"it does not use). {ASK_FOR_ARCH}"
        )
    reason = f"the names of {family.family.name} do not show the functions between its layers"
    return replace(layout, computation=Computation.unknown(reason))


def shapes_of(example: Any) -> Any:
    """Returns the part of an example input that a layout depends on."""
    if isinstance(example, Tensor):
        return tuple(example.shape)
    if isinstance(example, (list, tuple)):
        return tuple(shapes_of(item) for item in example)
    return repr(example)


def _arch_layout(arch: nn.Module, tensors: Mapping[str, Tensor], example_input: Any) -> Layout:
    """Returns the layout of a module for a checkpoint with its keys, perhaps behind a prefix."""
    expected = arch.state_dict()
    keys = Keys(tensors, expected)
    if not keys.fit:
        raise ConversionError(
            f"Expected the keys of {type(arch).__name__}, all behind one prefix (got a state dict "
            f"without {keys.missing[:5] or 'none of them missing'}, and with unknown "
            f"{keys.unknown[:5]})"
        )
    for key, own in keys.names.items():
        # Some programs save a counter as a vector of one entry.
        is_counter = not tensors[own].is_floating_point() and tensors[own].numel() == 1
        has_shape = tensors[own].shape == expected[key].shape
        if not has_shape and not (is_counter and expected[key].numel() == 1):
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


def _check_apart(tensors: Mapping[str, Any], is_family: bool) -> None:
    """Refuses shared and repeated tensors: without a module, they may be used once or twice.

    Families define where their tensors are used, and their blocks may start out equal. Tensors in
    the same memory, however, are one weight shared by two blocks.
    """
    memory: dict[int, str] = {}
    by_shape: dict[Any, list[str]] = {}
    for key, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.is_meta or not tensor.is_floating_point():
            continue
        first = memory.setdefault(tensor.data_ptr(), key) if tensor.dim() > 1 else key
        if first != key and not (is_family and may_share(first, key)):
            raise _repeated(first, key, "in the same memory")
        by_shape.setdefault((tensor.shape, tensor.dtype), []).append(key)
    for keys in () if is_family else by_shape.values():
        starts: dict[Any, list[str]] = {}
        for key in keys if len(keys) > 1 else ():
            start = _bits(tensors[key].flatten()[:_FIRST_ENTRIES]).tolist()
            alike = starts.setdefault(tuple(start), [])
            for other in alike:
                if _are_copies(_bits(tensors[key]), _bits(tensors[other])):
                    raise _repeated(other, key, "with the same values")
            alike.append(key)


def _repeated(first: str, second: str, how: str) -> ConversionError:
    return ConversionError(
        f"Expected distinct tensors (got '{first}' and '{second}' {how}: one layer under two "
        f"names, or one weight used twice). {ASK_FOR_ARCH}"
    )


def _are_copies(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal and not constant."""
    return torch.equal(one, other) and bool((one != one[:1]).any())


def _bits(tensor: Tensor) -> Tensor:
    """Views the entries as integers, which can be compared for any type."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().flatten().view(integers[tensor.element_size()])
