"""Makes two axes of neurons agree by merging and refining layers."""

from __future__ import annotations

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import (
    Factor,
    Layer,
    Segment,
    Segments,
    axis_size,
    describe,
    product,
    resolve,
    size_of,
    split,
)

_STEPS_PER_ENTRY = 4


def tie(left: Segments, right: Segments) -> None:
    """Ties two axes, entry for entry, so that their neurons are permuted together."""
    steps = 0
    while True:
        left, right = resolve(left), resolve(right)
        sizes = axis_size(left), axis_size(right)
        if None in sizes or sizes[0] != sizes[1]:
            raise ConversionError(
                f"Expected two axes of the same known size (got {describe(left)} and "
                f"{describe(right)})" + (". Pass an example_input" if None in sizes else "")
            )
        # Every step splits or merges entries, unless a layer would have to be a part of itself.
        steps += 1
        if steps > _STEPS_PER_ENTRY * (sizes[0] or 0) + _STEPS_PER_ENTRY:
            raise ConversionError(
                f"Expected one way to read {sizes[0]} neurons (got two that contradict each other, "
                f"such as a kernel that is used with groups and without)"
            )
        if not _approach(left, right):
            return


def _approach(left: Segments, right: Segments) -> bool:
    """Takes one step towards equal axes; returns whether there was one left to take."""
    for a, b in zip(left, right, strict=False):
        if a == b:
            continue
        sizes = a.size or 0, b.size or 0
        if sizes[0] != sizes[1]:
            _cut(*((a, b) if sizes[0] > sizes[1] else (b, a)))
            return True
        return _approach_products(a.factors, b.factors)
    return False


def _cut(large: Segment, small: Segment) -> None:
    """Splits the first layer of a segment, so that its first part is as large as another."""
    first, *rest = large.factors
    inside = 1
    for factor in rest:
        inside *= size_of(factor) or 1
    count, left = divmod(small.size or 0, inside)
    if not isinstance(first, Layer) or left or not 0 < count < first.size:
        raise _disagreement((large,), (small,))
    split(first, [count, first.size - count])


def _approach_products(a: tuple[Factor, ...], b: tuple[Factor, ...]) -> bool:
    """Takes one step towards two equal products of the same size."""
    while a and b and a[0] == b[0]:
        a, b = a[1:], b[1:]
    if not a or not b:
        return False
    first, second = a[0], b[0]
    if isinstance(first, tuple) or isinstance(second, tuple):
        return _approach(product(*a), product(*b))
    sizes = size_of(first) or 0, size_of(second) or 0
    if sizes[0] > sizes[1]:
        return _approach_products(b, a)
    ratio, rest = divmod(sizes[1], sizes[0])
    if rest:
        raise _disagreement((Segment(a),), (Segment(b),))
    if isinstance(first, Layer) and isinstance(second, Layer) and ratio == 1:
        _merge(first, second)
    elif isinstance(second, Layer) and ratio > 1:
        second.refined = (Segment(_mirrored(second, a)),)
    elif not isinstance(first, Layer) and not isinstance(second, Layer):
        return _approach_products(a[1:], (ratio, *b[1:]))
    else:
        layer = first if isinstance(first, Layer) else second
        if not isinstance(layer, Layer) or not layer.is_loose:
            raise _disagreement((Segment(a),), (Segment(b),))
        # Loose layers become positions.
        layer.refined = (Segment((layer.size,)),)
    return True


def _mirrored(layer: Layer, factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Splits a layer into parts like the first of some factors whose product it is."""
    found: list[Factor] = []
    left = layer.size
    for factor in factors:
        size = size_of(factor) or 1
        if left % size:
            if isinstance(factor, Layer | tuple) or size % left:
                break
            size = left
        part = layer.part(size, len(found))
        # Splitting a layer does not imply that both parts are neurons.
        part.is_loose = layer.is_loose or (isinstance(factor, Layer) and factor.is_loose)
        found.append(size if isinstance(factor, int) else part)
        left //= size
        if left == 1:
            return tuple(found)
    return (*found, layer.part(left, len(found)))


def _merge(first: Layer, second: Layer) -> None:
    first, second = first.root, second.root
    if first is second:
        return
    if second.order < first.order:
        first, second = second, first
    second.merged = first
    first.is_input |= second.is_input
    first.is_output |= second.is_output
    first.is_fixed |= second.is_fixed
    first.is_loose &= second.is_loose


def _disagreement(left: Segments, right: Segments) -> ConversionError:
    layers = [[f for f in side[0].factors if isinstance(f, Layer)] for side in (left, right)]
    reason = ""
    if len(left) == len(right) == 1 and all(len(factors) > 1 for factors in layers):
        reason = (
            ". The groups of one layer must be parts of the groups of the other, or be shuffled so "
            "that they are"
        )
    return ConversionError(
        f"Expected two axes whose neurons and positions agree (got {describe(left)} and "
        f"{describe(right)}){reason}"
    )
