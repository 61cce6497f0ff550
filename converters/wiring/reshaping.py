"""Reshapes: how the axes of an activation change, and what happens to its neurons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import (
    Factor,
    Layer,
    Segment,
    Segments,
    layers_of,
    product,
    resolve,
    size_of,
    solve,
)
from nfn_graph.converters.wiring.values import (
    Axis,
    NeuronAxis,
    Positions,
    Sizes,
    SplitAxis,
    num_entries,
    open_axes,
    settled,
    shown,
)


def merge_axes(axes: Sequence[Axis]) -> Axis:
    """Merges neighbouring axes into one; the last varies fastest."""
    axes = _rejoined([settled(axis) for axis in axes])
    holds_neurons = any(isinstance(axis, NeuronAxis) for axis in axes)
    segments = product(*(_factor(axis, axes) for axis in axes))
    return NeuronAxis(segments) if holds_neurons else Positions(num_entries(a.size for a in axes))


def split_axis(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Splits one axis into several; which of them hold neurons may stay open."""
    if isinstance(axis, Positions):
        return [Positions(size) for size in sizes]
    if not isinstance(axis, NeuronAxis):
        large = [i for i, size in enumerate(sizes) if size != 1] or [0]
        if len(large) > 1:
            axis.split.nest()
            return split_axis(settled(axis), sizes)
        found: list[Axis] = [Positions(1)] * len(sizes)
        found[large[0]] = axis
        return found
    blocks = _blocks(_factors(resolve(axis.segments)), sizes)
    if blocks is None:
        return open_axes(axis.segments, sizes)
    return [part for factors, some in blocks for part in _split_block(factors, some)]


def _split_block(factors: Sequence[Factor], sizes: Sequence[int]) -> list[Axis]:
    """Splits factors with the same product as some sizes into axes of these sizes."""
    segments = product(*factors)
    if not layers_of(segments):
        return [Positions(size) for size in sizes]
    if len(factors) > 1 and sum(size != 1 for size in sizes) > 1:
        return _split_inside(factors, sizes) or open_axes(segments, sizes)
    return open_axes(segments, sizes)


def _split_inside(factors: Sequence[Factor], sizes: Sequence[int]) -> list[Axis] | None:
    """Splits a layer at the bound of an axis that has other factors; None if impossible."""
    bounds = set(accumulate(sizes, mul))
    finer: list[Factor] = []
    refined: list[tuple[Layer, list[Layer]]] = []
    before = 1
    for factor in factors:
        end = before * (size_of(factor) or 1)
        cuts = [before, *sorted(n for n in bounds if before < n < end), end]
        steps = [b // a for a, b in pairwise(cuts)]
        if before * math.prod(steps) != end or (len(steps) > 1 and isinstance(factor, tuple)):
            return None
        if len(steps) > 1 and isinstance(factor, Layer):
            refined.append((factor, [factor.part(n, i) for i, n in enumerate(steps)]))
            finer += refined[-1][1]
        else:
            finer += steps if len(steps) > 1 else [factor]
        before = end
    if not bounds <= {1, *accumulate((size_of(factor) or 1 for factor in finer), mul)}:
        return None
    for layer, parts in refined:
        layer.refined = product(*parts)
    found: list[Axis] = []
    for size in sizes:
        some: list[Factor] = []
        while math.prod(size_of(factor) or 1 for factor in some) < size:
            some.append(finer.pop(0))
        segments = product(*some)
        found.append(NeuronAxis(segments) if layers_of(segments) else Positions(size))
    return found


def regroup(stored: Sequence[Axis], sizes: Sizes) -> tuple[Axis, ...]:
    """Returns the axes after a reshape; -1 for a size that is inferred, None for an unknown one."""
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
        if isinstance(merged, NeuronAxis) and size not in (None, -1):
            merged = NeuronAxis(solve(merged.segments, size))
        return (*found, merged)
    if None not in old and None not in new:
        return (*found, *_regroup_known(axes, _inferred(old, new)))
    raise ConversionError(
        f"Expected a reshape whose axes can be followed (got {shown([a.size for a in stored])} "
        f"to {shown(sizes)} with unknown sizes). Pass an example_input"
    )


def _regroup_known(axes: Sequence[Axis], new: list[int]) -> list[Axis]:
    old = [axis.size or 0 for axis in axes]
    if math.prod(old) != math.prod(new):
        raise ConversionError(f"Expected a reshape that keeps all entries (got {old} to {new})")
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
    """Whether an axis clearly stays unchanged: the batch, or an axis of equal known size."""
    if old is None or new in (None, -1):
        return first and old is None
    return old == new


def _rejoined(axes: list[Axis]) -> list[Axis]:
    """Merges the axes of a split that was never used."""
    found: list[Axis] = []
    i = 0
    while i < len(axes):
        axis = settled(axes[i])
        if not isinstance(axis, SplitAxis):
            found.append(axis)
            i += 1
            continue
        width = len(axis.split.sizes)
        group = axes[i : i + width]
        if [a.index for a in group if isinstance(a, SplitAxis) and a.split is axis.split] == list(
            range(width)
        ):
            found.append(NeuronAxis(axis.split.segments))
            i += width
        else:
            # The axes are apart: heads before positions, or shuffled channels.
            axis.split.nest()
    return found


def _factor(axis: Axis, beside: Sequence[Axis]) -> Factor:
    if isinstance(axis, NeuronAxis):
        return axis.segments
    if isinstance(axis, Positions) and axis.is_copied and axis.size not in (1, None):
        # Copies of neurons, such as keys that several heads share.
        first = next((layers_of(a.segments)[0] for a in beside if isinstance(a, NeuronAxis)), None)
        if first is not None:
            order = (*first.order, 0)
            return Layer(axis.size or 1, order, is_loose=True, values=first.values)
    return axis.size


def _factors(segments: Segments) -> list[Factor]:
    """Returns an axis as factors; positions that all segments end with become a common factor."""
    if len(segments) == 1:
        return list(segments[0].factors)
    last = {segment.factors[-1] for segment in segments}
    if len(last) == 1 and all(len(segment.factors) > 1 for segment in segments):
        (after,) = last
        if isinstance(after, int):
            return [tuple(Segment(segment.factors[:-1]) for segment in segments), after]
    return [segments]


def _blocks(
    factors: Sequence[Factor], sizes: Sequence[int]
) -> list[tuple[list[Factor], list[int]]] | None:
    """Divides factors and sizes into the smallest groups with equal products."""
    found: list[tuple[list[Factor], list[int]]] = []
    left, right = list(factors), list(sizes)
    while left:
        if not right:
            return None
        some, few = [left.pop(0)], [right.pop(0)]
        while True:
            entries = [size_of(factor) for factor in some]
            if None in entries:
                return None
            total = math.prod(n or 1 for n in entries)
            if total == math.prod(few):
                break
            if total > math.prod(few) and right:
                few.append(right.pop(0))
            elif total < math.prod(few) and left:
                some.append(left.pop(0))
            else:
                return None
        if len(some) == 1 and isinstance(some[0], int) and len(few) > 1:
            found += [([size], [size]) for size in few]
        else:
            found.append((some, few))
    if found and right:
        found[-1][1].extend(right)  # The remaining sizes are 1.
    return found
