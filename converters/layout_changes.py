"""Changes to a layout after it was found: permuted axes, and tensors that are left out."""

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
    """Returns the placement of `x`, given that of `x.permute(order)`.

    Args:
        placement: The placement of `x.permute(order)`.
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
    """Returns the placement of the same tensor with an axis of size 1 appended."""
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
    """Returns, for every axis of the tensor, the axes of the view that it was split into."""
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


#: The axis order of weights: `[out, in, ...]` or `[..., in, out]`.
Orientation = Literal["out_in", "in_out"]


def turned(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Views weights `[..., in, out]` as `[out, in, ...]`, and returns other values unchanged."""
    return {key: x.permute(_order(x.dim())) if _is_weight(x) else x for key, x in tensors.items()}


def turned_back(layout: Layout, tensors: Mapping[str, Any]) -> Layout:
    """Returns the layout of weights `[..., in, out]`, given that of their transposed views."""
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
    """Removes tensors from a layout.

    Types that hold nothing else are removed too. The remaining types keep the symmetry of the whole
    network, and the tensors that are left out are permuted together with the rest.

    Args:
        layout: The layout of the whole network.
        keys: All keys of the checkpoint.
        only: Patterns such as `encoder.*`. Keys that match none of them are left out, unless the
            sequence is empty.
        exclude: Patterns of keys to leave out.
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
                f"Expected patterns that match all keys of a tensor or none (got some that leave "
                f"out only a part of {list(p.keys)})"
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
    """Returns the types that still hold entries, connect such types, or are their parents."""
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
    """Yields the placements with the gaps between their taps closed."""
    filled: dict[tuple[Key, int], int] = {}
    for p in kept:
        at = filled.get((p.store, p.block), 0)
        filled[p.store, p.block] = at + p.taps
        yield replace(p, tap=at)


def _placed(p: Placement, spec: NetworkSpec) -> Placement | None:
    """Returns the place of an excluded tensor in the graph; axes of removed types become taps."""
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
