"""Reshapes: which axes of an activation become which, and what they do to its neurons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import Segments, resolve, solve, spread
from nfn_graph.converters.wiring.values import (
    Axis,
    Neurons,
    Part,
    Positions,
    Sizes,
    Split,
    settled,
    shown,
)


def merge_axes(axes: Sequence[Axis]) -> Axis:
    """Neighbouring axes as one, the last running fastest."""
    axes = _rejoined([settled(axis) for axis in axes])
    neurons = [i for i, axis in enumerate(axes) if isinstance(axis, Neurons)]
    if not neurons:
        return Positions(_product(axis.size for axis in axes))
    at = neurons[0]
    middle = axes[at]
    if len(neurons) > 1 or not isinstance(middle, Neurons):
        raise ConversionError("Expected one axis of neurons to flatten (got several)")
    before = _product(axis.size for axis in axes[:at])
    after = _product(axis.size for axis in axes[at + 1 :])
    return Neurons(spread(resolve(middle.segments), before, after))


def split_axis(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """One axis as several; which of them is the neurons' may stay open."""
    if isinstance(axis, Positions):
        return [Positions(size) for size in sizes]
    large = [i for i, size in enumerate(sizes) if size != 1] or [0]
    found: list[Axis] = [Positions(1)] * len(sizes)
    if len(large) == 1:
        found[large[0]] = axis
        return found
    if not isinstance(axis, Neurons):
        raise ConversionError("Expected an axis that was not split before (got one that was)")
    before, inner, after = _factors(resolve(axis.segments))
    count = sum(s.size or 0 for s in inner)
    for i, size in enumerate(sizes):
        fits = (math.prod(sizes[:i]), size, math.prod(sizes[i + 1 :])) == (before, count, after)
        if fits:
            found = [Positions(n) for n in sizes]
            found[i] = Neurons(inner)
            return found
    split = Split(axis.segments, tuple(sizes))
    return [Part(split, i) for i in range(len(sizes))]


def regroup(stored: Sequence[Axis], sizes: Sizes) -> tuple[Axis, ...]:
    """The axes after a reshape; -1 stands for the size that follows, None for any."""
    axes = [settled(axis) for axis in stored]
    old: list[int | None] = [axis.size for axis in axes]
    new = list(sizes)
    if None not in old and None not in new:
        return tuple(_regroup_known(axes, _inferred(old, new)))
    found: list[Axis] = []
    while axes and new and _may_pair(old[0], new[0], first=not found):
        found.append(axes[0])
        axes, old, new = axes[1:], old[1:], new[1:]
    if not axes and not new:
        return tuple(found)
    if axes and len(new) == 1:
        merged = merge_axes(axes)
        size = new[0]
        if isinstance(merged, Neurons) and size not in (None, -1):
            merged = Neurons(solve(merged.segments, size))
        return (*found, merged)
    if None not in old and None not in new:
        return (*found, *_regroup_known(axes, _inferred(old, new)))
    raise ConversionError(
        f"Expected a reshape whose axes can be followed (got {shown([a.size for a in stored])} "
        f"to {shown(sizes)} with unknown sizes). Give an example_input"
    )


def _regroup_known(axes: Sequence[Axis], new: list[int]) -> list[Axis]:
    old = [axis.size or 0 for axis in axes]
    if math.prod(old) != math.prod(new):
        raise ConversionError(f"Expected a reshape of as many entries (got {old} to {new})")
    found: list[Axis] = []
    i = j = 0
    while i < len(old) and j < len(new):
        last_i, last_j = i + 1, j + 1
        while math.prod(old[i:last_i]) != math.prod(new[j:last_j]):
            if math.prod(old[i:last_i]) < math.prod(new[j:last_j]):
                last_i += 1
            else:
                last_j += 1
        if last_j == len(new):
            last_i = len(old)
        found += split_axis(merge_axes(axes[i:last_i]), new[j:last_j])
        i, j = last_i, last_j
    return found + [Positions(1)] * (len(new) - j)


def _inferred(old: Sequence[int | None], new: Sequence[int | None]) -> list[int]:
    known = [n or 0 for n in new]
    if -1 in known:
        rest = -math.prod(known)
        total = math.prod(n or 0 for n in old)
        known[known.index(-1)] = total // rest if rest else 0
    return known


def _may_pair(old: int | None, new: int | None, *, first: bool) -> bool:
    """Whether an axis clearly stays as it is: the batch, or one of equal known size."""
    if old is None or new in (None, -1):
        return first and old is None
    return old == new


def _rejoined(axes: list[Axis]) -> list[Axis]:
    """The same axes with those of a split that was never used put together again."""
    found: list[Axis] = []
    i = 0
    while i < len(axes):
        axis = axes[i]
        if not isinstance(axis, Part):
            found.append(axis)
            i += 1
            continue
        width = len(axis.split.sizes)
        group = axes[i : i + width]
        if [a.index for a in group if isinstance(a, Part) and a.split is axis.split] != list(
            range(width)
        ):
            raise ConversionError(
                f"Expected the axes of a reshape of neurons to {axis.split.sizes} to be "
                f"flattened in their order (got others between them)"
            )
        found.append(Neurons(axis.split.segments))
        i += width
    return found


def _factors(segments: Segments) -> tuple[int | None, Segments, int | None]:
    """An axis as positions, neurons, positions, where all segments agree on the positions."""
    first = segments[0]
    if len(segments) == 1 and first.before != 1:
        inner: Segments = tuple(type(first)((layer,)) for layer in first.layers)
        return first.before, inner, first.after
    if all(s.before == 1 and s.after == first.after for s in segments):
        return 1, tuple(type(s)(s.layers) for s in segments), first.after
    return 1, segments, 1


def _product(sizes: Iterable[int | None]) -> int | None:
    total = 1
    for size in sizes:
        if size is None:
            return None
        total *= size
    return total
