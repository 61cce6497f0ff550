"""Checks that a graph read from a file is valid."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from nfn_graph import WeightGraph
from nfn_graph.data import Layout, Placement, PlacementAxis
from nfn_graph.messages import UserError
from nfn_graph.run import OPERATIONS
from nfn_graph.spec import NetworkSpec

_AXES = get_args(PlacementAxis)
_MOST_INPUTS = 1024


def check_graph(graph: WeightGraph) -> None:
    """Raises `ValueError` unless stores, sizes, placements and keys are consistent."""
    layout: Layout = graph.layout
    spec = layout.within or layout.spec
    for found, expected in (
        (graph.node_types, list(spec.neuron)),
        (graph.edge_types, list(spec.weight)),
    ):
        if set(found) != set(expected):
            raise UserError(f"Expected stores of the types {expected} (got {found})")
    # This check comes first. After it, no size exceeds that of a tensor in the file.
    graph._check(spec)
    for store in (*graph.node_stores, *graph.edge_stores):
        features = store.get("x") if "x" in store else store.get("edge_attr")
        if not isinstance(features, Tensor) or not features.is_floating_point():
            got = features.dtype if isinstance(features, Tensor) else type(features).__name__
            raise UserError(f"Expected floating-point features of {store._key!r} (got {got})")
    _check_layout(layout)


def _check_layout(layout: Layout) -> None:
    for spec in (layout.spec, layout.within):
        if spec is not None:
            _check_spec(spec)
    _check_sizes("sizes", [n for sizes in layout.shape.sizes for n in sizes])
    _check_sizes("blocks", [n for ends in layout.shape.blocks for pair in ends for n in pair])
    tensors: dict[str, list[Placement]] = {}
    for placement in layout.placements:
        _check_placement(placement)
        tensors.setdefault(placement.keys[0], []).append(placement)
    _check_unique("tensors", [key for parts in tensors.values() for key in parts[0].keys])
    for key, parts in tensors.items():
        _check_parts(key, parts)
    for key, own in layout.aside.items():
        carried: object = layout.carried.get(key)
        if not isinstance(carried, Tensor):
            raise UserError(f"Expected '{key}' to be carried along (got no such tensor)")
        for placement in own:
            _check_placement(placement)
            store = placement.store
            ends = (store,) if isinstance(store, str) else (store[0], store[2])
            if placement.keys[0] != key or any(name not in layout.spec.neuron for name in ends):
                raise UserError(f"Expected a place of '{key}' in the graph (got {placement})")
    known = {*layout.placed, *layout.carried}
    _check_unique("tensors", [*layout.placed, *layout.carried])
    _check_unique("keys", layout.keys)
    for name, keys in (("keys", layout.keys), *layout.channels.items()):
        allowed = known if keys is layout.keys else layout.placed
        unknown = [key for key in keys if key not in allowed]
        if unknown:
            raise UserError(f"Expected {name} of tensors of the graph (got {unknown[:5]})")
    _check_computation(layout)
    if layout.before is not None:
        transform, before = layout.before
        if not isinstance(transform, str):
            raise UserError(f"Expected the name of a transform (got {transform!r})")
        # Transforms never remove entries, so no size here exceeds that of a tensor either.
        if _num_entries(before) > _num_entries(layout):
            raise UserError(
                f"Expected at most {_num_entries(layout)} entries before the transform "
                f"'{transform}' (got {_num_entries(before)})"
            )
        _check_layout(before)


def _check_computation(layout: Layout) -> None:
    for step in layout.computation.steps:
        if step.operation in ("input", "parameter"):
            below = len(layout.sources) if step.operation == "parameter" else _MOST_INPUTS
            number = step.args[0] if len(step.args) == 1 else None
            if type(number) is not int or not 0 <= number < below:
                raise UserError(f"Expected the number of an {step.operation} (got {step})")
        elif step.operation != "constant" and step.operation not in OPERATIONS:
            raise UserError(f"Expected a known operation (got '{step.operation}')")
    unknown = [n.name for n in layout.computation.activations if n.name not in layout.spec.neuron]
    if unknown:
        raise UserError(f"Expected activations of neuron types of the graph (got {unknown[:5]})")


def _num_entries(layout: Layout) -> int:
    return sum(math.prod(p.taken) for p in layout.placements)


def _check_spec(spec: NetworkSpec) -> None:
    names = [n.name for n in spec.neurons]
    names += [part for w in spec.weights for part in (w.source, w.name, w.target)]
    if not all(isinstance(name, str) for name in names):
        raise UserError(f"Expected names of types to be text (got {names})")
    _check_sizes("taps", [*(n.taps for n in spec.neurons), *(w.taps for w in spec.weights)])
    _check_sizes("sizes", [n.size for n in spec.neurons if n.size is not None])
    if not all(isinstance(flag, bool) for n in spec.neurons for flag in (n.fixed, n.role)):
        raise UserError("Expected fixed and role of neuron types to be booleans (got other values)")


def _check_placement(p: Placement) -> None:
    if not isinstance(p.keys, tuple) or not all(isinstance(key, str) for key in p.keys):
        raise UserError(f"Expected the keys of a tensor (got {p.keys!r})")
    where = f"of '{p.keys[0]}'"
    if not p.dtype.is_floating_point:
        raise UserError(f"Expected a floating-point type {where} (got {p.dtype})")
    _check_sizes(f"sizes {where}", [*p.shape, *p.view, *p.start, *p.stop, p.tap, p.block])
    ranks = {len(p.view), len(p.axes), len(p.start), len(p.stop)}
    # Nested neurons have one axis per index, such as heads and the dimensions inside them.
    roles = {axis for axis in p.axes if axis != "tap"}
    expected = ["neuron"] if isinstance(p.store, str) else ["source", "target"]
    if len(ranks) != 1 or any(axis not in _AXES for axis in p.axes) or roles != set(expected):
        raise UserError(f"Expected the axes {expected} and taps {where} (got {p.axes})")
    _check_ranges(where, zip(p.start, p.stop, p.view, strict=True))
    if p.cut is not None:
        _check_sizes(f"cut {where}", [n for ends in p.cut for n in ends])
        _check_ranges(where, ((a, b, n) for (a, b), n in zip(p.cut, p.shape, strict=True)))
    viewed = [b - a for a, b in p.cut] if p.cut is not None else p.shape
    if math.prod(viewed) != math.prod(p.view):
        raise UserError(f"Expected a view of {list(viewed)} {where} (got {list(p.view)})")
    # Checks on the meta device that the view is valid and has the right number of entries.
    rows = torch.empty(p.count, p.taps, 1, dtype=p.dtype, device="meta")
    p.put(rows, torch.empty(*p.shape, 1, dtype=p.dtype, device="meta"))


def _check_parts(key: str, parts: Sequence[Placement]) -> None:
    """Raises unless the parts belong to one tensor and cover every entry once."""
    first = parts[0]
    if any((p.keys, p.shape, p.dtype) != (first.keys, first.shape, first.dtype) for p in parts):
        raise UserError(f"Expected one shape, type and set of names of '{key}' (got several)")
    if len(parts) > 1:
        taken = torch.zeros(first.shape, dtype=torch.uint8)
        for p in parts:
            view = p.viewed(taken.unsqueeze(0))[0]
            view[p.slices] += 1
        if not bool((taken == 1).all()):
            wrong = int((taken != 1).sum())
            raise UserError(
                f"Expected every entry of '{key}' to be placed once (got {wrong} that are not)"
            )


def _check_sizes(name: str, sizes: Iterable[Any]) -> None:
    wrong = [size for size in sizes if type(size) is not int or size < 0]
    if wrong:
        raise UserError(f"Expected {name} as integers of at least 0 (got {wrong[:5]})")


def _check_ranges(where: str, ranges: Iterable[tuple[int, int, int]]) -> None:
    for start, stop, size in ranges:
        if not 0 <= start < stop <= size:
            raise UserError(f"Expected a part {where} within {size} (got {start}:{stop})")


def _check_unique(name: str, keys: Sequence[str]) -> None:
    if any(not isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise UserError(f"Expected {name} to be distinct texts (got {list(keys)[:20]})")
