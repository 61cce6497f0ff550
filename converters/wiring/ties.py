"""What it takes to make two axes of neurons agree: layers that are merged and refined."""

from __future__ import annotations

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import (
    Layer,
    Segment,
    Segments,
    axis_size,
    describe,
    resolve,
    split,
)


def tie(left: Segments, right: Segments) -> None:
    """Makes two axes one: entry for entry, their neurons are permuted together."""
    while True:
        left, right = resolve(left), resolve(right)
        sizes = axis_size(left), axis_size(right)
        if None in sizes or sizes[0] != sizes[1]:
            raise ConversionError(
                f"Expected two axes of the same known size (got {describe(left)} and "
                f"{describe(right)})" + (". Give an example_input" if None in sizes else "")
            )
        pairs = _aligned(left, right)
        if pairs is not None:
            for first, second in pairs:
                _merge(first, second)
            return


def _aligned(left: Segments, right: Segments) -> list[tuple[Layer, Layer]] | None:
    """Pairs of equal layers, or None after a first refinement towards them."""
    pairs: list[tuple[Layer, Layer]] = []
    for a, b in zip(left, right, strict=False):
        if (a.before, a.after) != (b.before, b.after):
            _refine(a, b)
            return None
        for first, second in zip(a.layers, b.layers, strict=False):
            if first.size != second.size:
                large, small = sorted((first, second), key=lambda n: -n.size)
                split(large, [small.size, large.size - small.size])
                return None
            pairs.append((first, second))
        if a.neurons != b.neurons and a.before != 1:
            raise ConversionError(
                f"Expected two axes whose positions agree (got {describe(left)} and "
                f"{describe(right)})"
            )
    return pairs


def _refine(a: Segment, b: Segment) -> None:
    """Takes the coarser of two segments apart, one step towards the finer one."""
    coarse, fine = (a, b) if (a.before == 1 and (a.after or 1) < (b.after or 1)) else (b, a)
    if coarse.before != 1 and fine.before == 1:
        coarse, fine = fine, coarse
    ratio, rest = divmod(fine.after or 1, coarse.after or 1)
    if coarse.before == 1 and not rest:
        layer = coarse.layers[0]
        entries = (fine.size or 0) // (coarse.after or 1)
        if layer.size > entries:
            split(layer, [entries, layer.size - entries])
            return
        if layer.size == entries:
            parts = tuple(layer.part(n.size, i) for i, n in enumerate(fine.layers))
            layer.refined = (Segment(parts, fine.before, ratio),)
            return
        if fine.before == 1 and layer.size % ratio == 0:
            layer.refined = (Segment((layer.part(layer.size // ratio, 0),), 1, ratio),)
            return
    raise ConversionError(
        f"Expected two axes whose positions agree (got {describe((a,))} and {describe((b,))})"
    )


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
