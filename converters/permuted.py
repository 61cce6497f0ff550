"""Placements of tensors that were converted with their axes in another order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nfn_graph.converters.errors import ConversionError
from nfn_graph.data import Placement


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
