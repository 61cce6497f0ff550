r"""Axes that consist of neuron layers, with their positions.

While a computation is followed, the channel axis of an activation is written as a tuple of
:class:`Segment`, one after another (a concatenation). A segment is an axis of
`before * sum of layer sizes * after` entries, the last factor running fastest: after
`flatten`, the spatial positions of a channel are `after` entries of its neuron, or, if the
channels were permuted to the end before, `before` entries.

A :class:`Layer` is a node of a union-find: layers whose neurons must be permuted together are
merged, and a layer is *refined* into several (slices, concatenations) or into neurons with
positions (the reverse of a flatten) where it turns out to consist of them. Nothing is placed
until all is known: :func:`resolve` gives an axis in terms of the layers that are left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from nfn_graph.converters.errors import ConversionError


@dataclass(eq=False)
class Layer:
    """A layer of neurons under construction.

    Args:
        size: The number of neurons.
        order: Its place along the computation; parts of a layer come in its place.
        is_input: Whether it is read from the network's input.
        is_output: Whether it is an output of the network.
        is_fixed: Whether its neurons keep their order for another reason.
        merged: The layer that it was tied to.
        refined: What it turned out to consist of.
    """

    size: int
    order: tuple[int, ...]
    is_input: bool = False
    is_output: bool = False
    is_fixed: bool = False
    merged: Layer | None = None
    refined: Segments | None = None

    @property
    def root(self) -> Layer:
        """The layer that stands for all that are tied to this one."""
        layer = self
        while layer.merged is not None:
            layer = layer.merged
        return layer

    @property
    def fixed(self) -> bool:
        """Whether the neurons keep their order."""
        return self.is_input or self.is_output or self.is_fixed

    def part(self, size: int, index: int) -> Layer:
        """A new layer for a part of this one."""
        return Layer(size, (*self.order, index), self.is_input, self.is_output, self.is_fixed)


@dataclass(frozen=True)
class Segment:
    """`before * sum(layer sizes) * after` entries of an axis; None where not yet known.

    Several layers only where `before` is not 1; otherwise they are segments of their own.
    """

    layers: tuple[Layer, ...]
    before: int | None = 1
    after: int | None = 1

    @property
    def neurons(self) -> int:
        """The neurons of all its layers."""
        return sum(layer.size for layer in self.layers)

    @property
    def size(self) -> int | None:
        """The number of entries."""
        if self.before is None or self.after is None:
            return None
        return self.before * self.neurons * self.after

    @property
    def is_plain(self) -> bool:
        """Whether it is just a layer, without positions."""
        return self.before == 1 and self.after == 1


Segments = tuple[Segment, ...]


def plain(*layers: Layer) -> Segments:
    """An axis of whole layers, one after another."""
    return tuple(Segment((layer,)) for layer in layers)


def axis_size(segments: Segments) -> int | None:
    """The number of entries, None if not known."""
    total = 0
    for segment in segments:
        if segment.size is None:
            return None
        total += segment.size
    return total


def resolve(segments: Segments) -> Segments:
    """The same axis in terms of the layers that stand for it now."""
    return tuple(part for segment in segments for part in _resolve_segment(segment))


def solve(segments: Segments, total: int) -> Segments:
    """The same axis with its unknown number of positions found from its size."""
    segments = resolve(segments)
    known = sum(s.size for s in segments if s.size is not None)
    unknown = [i for i, s in enumerate(segments) if s.size is None]
    if not unknown:
        if known != total:
            raise ConversionError(f"Expected an axis of {known} entries (got {total})")
        return segments
    open_ = segments[unknown[0]]
    factor = open_.neurons * (open_.before or 1) * (open_.after or 1)
    rest = total - known
    if (
        len(unknown) > 1
        or (open_.before is None and open_.after is None)
        or rest <= 0
        or rest % factor
    ):
        raise ConversionError(
            f"Expected an axis of {total} entries to be {factor} entries times a number of "
            f"positions that its size alone settles (got {describe(segments)}). Give an "
            f"example_input, so that the shapes are known"
        )
    positions = rest // factor
    solved = (
        replace(open_, before=positions)
        if open_.before is None
        else replace(open_, after=positions)
    )
    return resolve((*segments[: unknown[0]], solved, *segments[unknown[0] + 1 :]))


def spread(segments: Segments, before: int | None, after: int | None) -> Segments:
    """The axis that a flatten makes of this one between `before` and `after` positions."""
    if before == 1:
        return tuple(replace(s, after=_product(s.after, after)) for s in segments)
    if len(segments) == 1:
        one = segments[0]
        return (Segment(one.layers, _product(before, one.before), _product(one.after, after)),)
    if len({s.after for s in segments}) == 1 and all(s.before == 1 for s in segments):
        layers = tuple(layer for s in segments for layer in s.layers)
        return (Segment(layers, before, _product(segments[0].after, after)),)
    raise ConversionError(
        f"Expected the layers of an axis to alternate in one way (got {before} x "
        f"({describe(segments)}), which no view of the tensor can take apart)"
    )


def take(segments: Segments, start: int, stop: int) -> Segments:
    """The entries `start:stop` of an axis, splitting layers where needed."""
    segments = resolve(segments)
    total = axis_size(segments)
    if total is None or not 0 <= start < stop <= total:
        raise ConversionError(
            f"Expected a slice within an axis of known size (got {start}:{stop} of "
            f"{describe(segments)})"
        )
    taken: list[Segment] = []
    offset = 0
    for segment in segments:
        size = segment.size or 0
        first, last = max(start - offset, 0), min(stop - offset, size)
        offset += size
        if first >= last:
            continue
        if (first, last) == (0, size):
            taken.append(segment)
            continue
        after = segment.after or 1
        if segment.before != 1 or first % after or last % after:
            raise ConversionError(
                f"Expected a slice at the bounds of neurons (got {start}:{stop} of "
                f"{describe(segments)}, which cuts through the positions of a neuron)"
            )
        first, last = first // after, last // after
        neurons = segment.neurons
        sizes = [n for n in (first, last - first, neurons - last) if n]
        parts = split(segment.layers[0], sizes)
        taken.append(Segment((parts[1 if first else 0],), 1, after))
    return resolve(tuple(taken))


def split(layer: Layer, sizes: Sequence[int]) -> list[Layer]:
    """Refines a layer into parts of the given sizes."""
    parts = [layer.part(size, i) for i, size in enumerate(sizes)]
    layer.refined = plain(*parts)
    return parts


def describe(segments: Segments) -> str:
    """An axis in words, for messages."""
    words = []
    for s in segments:
        sizes = "+".join(str(layer.size) for layer in s.layers)
        before = "" if s.before == 1 else f"{s.before or '?'} x "
        after = "" if s.after == 1 else f" x {s.after or '?'}"
        words.append(f"{before}{sizes} neurons{after}")
    return " then ".join(words)


def layers_of(segments: Segments) -> list[Layer]:
    """The layers that an axis consists of now."""
    return [layer for segment in resolve(segments) for layer in segment.layers]


def _product(first: int | None, second: int | None) -> int | None:
    return None if first is None or second is None else first * second


def _resolve_segment(segment: Segment) -> Segments:
    inner: list[Segment] = []
    for layer in segment.layers:
        root = layer.root
        inner += resolve(root.refined) if root.refined is not None else plain(root)
    return spread(tuple(inner), segment.before, segment.after)


def layer_orders() -> Iterator[tuple[int, ...]]:
    """Places along the computation, for new layers."""
    return ((i,) for i in count())
