"""Layouts that are changed after they were found: axes in another order, tensors left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.data import Computation, Layout, Placement, PlacementAxis, View
from nfn_graph.spec import Key, NetworkSpec, Shape


def permuted(
    placement: Placement, order: Sequence[int], keys: tuple[str, ...], rank: int | None = None
) -> Placement:
    """The placement of `x`, given that of `x.permute(order)`.

    Args:
        placement: Where the entries of `x.permute(order)` go.
        order: The axes of `x` in the order in which they were converted.
        keys: The names of `x`.
        rank: The number of axes of `x`, if some of size 1 were left out.
    """
    for axis in range(rank or 0):
        if axis not in order:
            order, placement = (*order, axis), _with_unit_axis(placement)
    groups = _groups(placement)
    back = [list(order).index(axis) for axis in range(len(order))]
    axes = [i for converted in back for i in groups[converted]]
    cut = placement.cut
    return replace(
        placement,
        keys=keys,
        shape=tuple(placement.shape[i] for i in back),
        cut=None if cut is None else tuple(cut[i] for i in back),
        view=tuple(placement.view[i] for i in axes),
        axes=tuple(placement.axes[i] for i in axes),
        start=tuple(placement.start[i] for i in axes),
        stop=tuple(placement.stop[i] for i in axes),
    )


def _with_unit_axis(placement: Placement) -> Placement:
    """The placement of the same tensor with an axis of size 1 at its end."""
    cut = placement.cut
    return replace(
        placement,
        shape=(*placement.shape, 1),
        cut=None if cut is None else (*cut, (0, 1)),
        view=(*placement.view, 1),
        axes=(*placement.axes, "tap"),
        start=(*placement.start, 0),
        stop=(*placement.stop, 1),
    )


def _groups(placement: Placement) -> list[list[int]]:
    """For every axis of the tensor, the axes of the view that it was split into."""
    view, position = placement.view, 0
    groups: list[list[int]] = []
    shape = placement.shape
    if placement.cut is not None:
        shape = tuple(stop - start for start, stop in placement.cut)
    for size in shape:
        group: list[int] = []
        while position < len(view) and (not group or math.prod(view[i] for i in group) < size):
            group.append(position)
            position += 1
        groups.append(group)
        if math.prod(view[i] for i in group) != size:
            break
    while groups and position < len(view) and view[position] == 1:
        groups[-1].append(position)
        position += 1
    sizes = [math.prod(view[i] for i in group) for group in groups]
    if tuple(sizes) != shape or position != len(view):
        raise ConversionError(
            f"Expected a view of '{placement.keys[0]}' that splits its axes (got shape "
            f"{shape} viewed as {view})"
        )
    return groups


#: How weights are stored: as `[out, in, ...]`, or as `[..., in, out]`.
Orientation = Literal["out_in", "in_out"]


def turned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Views of weights `[..., in, out]` as `[out, in, ...]`, and all else as it is."""
    return {key: x.permute(_order(x.dim())) if _is_weight(x) else x for key, x in tensors.items()}


def turned_back(layout: Layout, tensors: Mapping[str, Any]) -> Layout:
    """The layout of weights `[..., in, out]`, given that of their views."""
    views: dict[int, list[View]] = {
        number: [("permute", (_order(len(parts[0].shape)),))]
        for number, parts in enumerate(layout.sources)
        if _is_weight(tensors[parts[0].keys[0]])
    }
    placements = (
        permuted(p, _order(len(p.shape)), p.keys) if _is_weight(tensors[p.keys[0]]) else p
        for p in layout.placements
    )
    return replace(
        layout, placements=tuple(placements), computation=layout.computation.reading(views)
    )


def _is_weight(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1


def _order(axes: int) -> tuple[int, ...]:
    return (axes - 1, axes - 2, *range(axes - 2))


def leave_out(
    layout: Layout, keys: Sequence[str], only: Sequence[str], exclude: Sequence[str]
) -> Layout:
    """The layout without some of its tensors.

    Types that nothing else holds go with them. What the other types are, and so their symmetry, is
    still that of the whole network: the tensors that are left out are permuted with the rest.

    Args:
        layout: That of the whole network.
        keys: All keys of the checkpoint.
        only: Patterns (`encoder.*`) of which a key must match one to stay; no patterns, no matter.
        exclude: Patterns of which it must match none.
    """
    only, exclude = _patterns("only", only, keys), _patterns("exclude", exclude, keys)
    gone = {
        key
        for p in layout.placements
        for key in p.keys
        if (only and not _matches(key, only)) or _matches(key, exclude)
    }
    if not gone:
        return layout
    for p in layout.placements:
        if 0 < len(gone.intersection(p.keys)) < len(p.keys):
            raise ConversionError(
                f"Expected patterns for all keys of one tensor (got some that leave out only a "
                f"part of {list(p.keys)})"
            )
    kept = [p for p in layout.placements if p.keys[0] not in gone]
    spec, shape = _remaining(layout, kept)
    first = next(key for key in keys if key in gone)
    return replace(
        layout,
        spec=spec,
        shape=shape,
        placements=tuple(_packed(kept)),
        aside={
            key: tuple(
                replace(found, keys=(key,))
                for p in layout.placements
                if key in p.keys and (found := _placed(p, spec)) is not None
            )
            for key in keys
            if key in gone
        },
        computation=Computation.unknown(f"'{first}' was left out of it"),
    )


def _patterns(name: str, patterns: Sequence[str], keys: Sequence[str]) -> Sequence[str]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in keys):
            shown = ", ".join(f"'{key}'" for key in list(keys)[:3])
            raise ConversionError(
                f"Expected patterns in {name} that match a key (got '{pattern}', which matches "
                f"none of {len(keys)}: {shown}, ...)"
            )
    return patterns


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _remaining(layout: Layout, kept: Sequence[Placement]) -> tuple[NetworkSpec, Shape]:
    """The types that still hold something, or join or contain others that do."""
    taps: dict[Key, int] = {}
    for p in kept:
        if p.block == 0:
            taps[p.store] = taps.get(p.store, 0) + p.taps
    weights = [w for w in layout.spec.weights if w.key in taps]
    if not weights:
        raise ConversionError(
            "Expected only= and exclude= to leave a weight between two layers (got none)"
        )
    names = {key for key in taps if isinstance(key, str)}
    names.update(end for w in weights for end in (w.source, w.target))
    pending = list(names)
    while pending:
        parents = [p for p in layout.spec.neuron[pending.pop()].parents if p not in names]
        names.update(parents)
        pending += parents
    neurons = [n for n in layout.spec.neurons if n.name in names]
    sizes = dict(zip(layout.spec.neuron, layout.shape.sizes, strict=True))
    blocks = dict(zip(layout.spec.weight, layout.shape.blocks, strict=True))
    spec = NetworkSpec(
        tuple(replace(n, taps=taps.get(n.name, 0)) for n in neurons),
        tuple(replace(w, taps=taps[w.key]) for w in weights),
    )
    return spec, Shape(tuple(sizes[n.name] for n in neurons), tuple(blocks[w.key] for w in weights))


def _packed(kept: Sequence[Placement]) -> Iterator[Placement]:
    """The placements without gaps between their taps."""
    filled: dict[tuple[Key, int], int] = {}
    for p in kept:
        at = filled.get((p.store, p.block), 0)
        filled[p.store, p.block] = at + p.taps
        yield replace(p, tap=at)


def _placed(p: Placement, spec: NetworkSpec) -> Placement | None:
    """Where a tensor that is left out lies in the graph; axes of types that are gone are taps."""
    if isinstance(p.store, str):
        return replace(p, tap=0) if p.store in spec.neuron else None
    ends = {"target": p.store[2], "source": p.store[0]}
    there = [role for role, name in ends.items() if name in spec.neuron]
    if len(there) == 2:
        return replace(p, tap=0)
    if not there:
        return None
    axes: tuple[PlacementAxis, ...] = tuple(
        "neuron" if axis == there[0] else "tap" for axis in p.axes
    )
    return replace(p, store=ends[there[0]], axes=axes, tap=0)
