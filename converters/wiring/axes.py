r"""Axes that consist of neuron layers, with their positions.

While a computation is followed, an axis of an activation is a tuple of :class:`Segment`, one after
another (a concatenation). A segment is a product of layers and of numbers of positions, in which
the last factor varies fastest: after `flatten`, the spatial positions of a channel are a number
after its layer, or before it if the channels were permuted to the end. The dimensions of attention
heads are two layers, `heads x dimensions`. A factor may itself be an axis if the entries of a
concatenation alternate.

A :class:`Layer` is a node of a union-find structure. Layers whose neurons must be permuted together
are merged, and a layer is *refined* into several (slices, concatenations) or into a product (the
reverse of a flatten) if it turns out to consist of them. Tensors are placed only after everything
is known. :func:`resolve` expresses an axis in terms of the layers that are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Union

from nfn_graph.converters.errors import ConversionError


@dataclass(eq=False)
class Layer:
    """A layer of neurons under construction.

    Args:
        size: The number of neurons.
        order: Its position in the computation; parts of a layer take its position.
        is_input: Whether it is read from the network's input.
        is_output: Whether it is an output of the network.
        is_fixed: Whether its neurons keep their order for another reason.
        is_loose: Whether these may turn out not to be neurons, as for the axes of a reshape or
            copies of one value. They become positions if they are used as such.
        merged: The layer that it was tied to.
        refined: The segments that it turned out to consist of.
        values: All values of the network that hold neurons of any layer.
    """

    size: int
    order: tuple[int, ...]
    is_input: bool = False
    is_output: bool = False
    is_fixed: bool = False
    is_loose: bool = False
    merged: Layer | None = None
    refined: Segments | None = None
    values: list[Any] = field(default_factory=list, repr=False)

    @property
    def root(self) -> Layer:
        """The layer that represents all layers tied to this one."""
        layer = self
        while layer.merged is not None:
            layer = layer.merged
        return layer

    @property
    def fixed(self) -> bool:
        """Whether the neurons keep their order."""
        return self.is_input or self.is_output or self.is_fixed

    def part(self, size: int, index: int) -> Layer:
        """Returns a new layer for a part of this one."""
        return Layer(
            size,
            (*self.order, index),
            self.is_input,
            self.is_output,
            self.is_fixed,
            self.is_loose,
            values=self.values,
        )


# A layer, an axis inside the product, or a number of positions (None if not yet known).
Factor = Union[Layer, "Segments", int, None]


@dataclass(frozen=True)
class Segment:
    """Entries of an axis that are a product of layers and positions, the last one fastest."""

    factors: tuple[Factor, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers among its factors, including those of axes inside it."""
        return tuple(layer for factor in self.factors for layer in _layers_in(factor))

    @property
    def size(self) -> int | None:
        """The number of entries."""
        sizes = [size_of(factor) for factor in self.factors]
        return None if None in sizes else math.prod(n for n in sizes if n is not None)


Segments = tuple[Segment, ...]

#: Layers in the order in which they number the neurons of a type, parents first.
Nest = tuple[Layer, ...]


def plain(*layers: Layer) -> Segments:
    """Returns an axis of whole layers, one after another."""
    return tuple(Segment((layer,)) for layer in layers)


def size_of(factor: Factor) -> int | None:
    """Returns the number of entries of a factor; None if unknown."""
    if isinstance(factor, Layer):
        return factor.size
    return axis_size(factor) if isinstance(factor, tuple) else factor


def axis_size(segments: Segments) -> int | None:
    """Returns the number of entries; None if unknown."""
    total = 0
    for segment in segments:
        if segment.size is None:
            return None
        total += segment.size
    return total


def resolve(segments: Segments) -> Segments:
    """Expresses an axis in terms of the layers that currently represent it."""
    found: list[Segment] = []
    for segment in segments:
        for part in product(*segment.factors):
            if found and _is_number(found[-1]) and _is_number(part):
                # Adjacent positions are merged.
                found[-1] = Segment((_sum(found[-1].factors[0], part.factors[0]),))
            else:
                found.append(part)
    return tuple(found)


def product(*factors: Factor) -> Segments:
    """Returns the axis that a flatten makes of several: a concatenation of products."""
    found: list[Factor] = []
    for place, factor in enumerate(factors):
        parts = _current(factor)
        if not isinstance(parts, tuple):
            _append(found, parts)
        elif len(parts) == 1:
            for inner in parts[0].factors:
                _append(found, inner)
        elif not found:
            rest = factors[place + 1 :]
            return tuple(s for part in parts for s in product(*part.factors, *rest))
        else:
            found.append(parts)
    return (Segment(tuple(found) or (1,)),)


def solve(segments: Segments, total: int) -> Segments:
    """Determines the unknown number of positions of an axis from its size."""
    segments = resolve(segments)
    known = sum(s.size for s in segments if s.size is not None)
    unknown = [i for i, s in enumerate(segments) if s.size is None]
    if not unknown:
        if known != total:
            raise ConversionError(f"Expected an axis of {known} entries (got {total})")
        return segments
    open_ = segments[unknown[0]]
    factor = math.prod(size_of(f) or 1 for f in open_.factors)
    rest = total - known
    if len(unknown) > 1 or open_.factors.count(None) != 1 or rest <= 0 or rest % factor:
        raise ConversionError(
            f"Expected an axis of {total} entries to be {factor} entries times a number of "
            f"positions that its size determines (got {describe(segments)}). Pass an "
            f"example_input, so that the shapes are known"
        )
    solved = Segment(tuple(rest // factor if f is None else f for f in open_.factors))
    return resolve((*segments[: unknown[0]], solved, *segments[unknown[0] + 1 :]))


def take(segments: Segments, start: int, stop: int) -> Segments:
    """Returns the entries `start:stop` of an axis, and splits layers if necessary."""
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
        whole, *rest = segment.factors
        after = math.prod(size_of(factor) or 1 for factor in rest)
        if first % after or last % after:
            raise ConversionError(
                f"Expected a slice at the bounds of neurons (got {start}:{stop} of "
                f"{describe(segments)}, which cuts through the positions of a neuron)"
            )
        first, last = first // after, last // after
        part: Factor = last - first
        if isinstance(whole, Layer):
            sizes = [n for n in (first, last - first, whole.size - last) if n]
            part = split(whole, sizes)[1 if first else 0]
        taken.append(Segment((part, *rest)))
    return resolve(tuple(taken))


def split(layer: Layer, sizes: Sequence[int]) -> list[Layer]:
    """Refines a layer into consecutive parts of the given sizes."""
    parts = [layer.part(size, i) for i, size in enumerate(sizes)]
    layer.refined = plain(*parts)
    return parts


def describe(segments: Segments) -> str:
    """Describes an axis, for messages."""
    return " then ".join(_describe(segment) for segment in segments)


def layers_of(segments: Segments) -> list[Layer]:
    """Returns the layers that an axis currently consists of."""
    return [layer for segment in resolve(segments) for layer in segment.layers]


def layer_orders() -> Iterator[tuple[int, ...]]:
    """Yields positions in the computation for new layers."""
    return ((i,) for i in count())


def _describe(segment: Segment) -> str:
    words = []
    for factor in segment.factors:
        if isinstance(factor, tuple):
            words.append(f"({describe(factor)})")
        else:
            size = size_of(factor)
            words.append(f"{'?' if size is None else size}")
            words[-1] += " neurons" if isinstance(factor, Layer) else ""
    return " x ".join(words)


def _current(factor: Factor) -> Segments | int | None:
    """Returns a factor in normal form: an axis of resolved products, or a number of positions."""
    if isinstance(factor, Layer):
        root = factor.root
        if root.refined is None:
            return plain(root)
        factor = root.refined
    if not isinstance(factor, tuple):
        return factor
    axis = resolve(factor)
    if len(axis) == 1 and _is_number(axis[0]):
        number = axis[0].factors[0]
        return number if number is None or isinstance(number, int) else axis
    return axis


def _append(found: list[Factor], factor: Factor) -> None:
    """Adds a factor; adjacent positions are merged into one number."""
    if factor == 1 and isinstance(factor, int):
        return
    is_number = factor is None or isinstance(factor, int)
    if is_number and found and (found[-1] is None or isinstance(found[-1], int)):
        last = found.pop()
        known = isinstance(last, int) and isinstance(factor, int)
        found.append(last * factor if known else None)  # type: ignore[operator]
    else:
        found.append(factor)


def _is_number(segment: Segment) -> bool:
    factor = segment.factors[0]
    return len(segment.factors) == 1 and (factor is None or isinstance(factor, int))


def _sum(first: Factor, second: Factor) -> int | None:
    return first + second if isinstance(first, int) and isinstance(second, int) else None


def _layers_in(factor: Factor) -> Iterator[Layer]:
    if isinstance(factor, Layer):
        yield factor
    elif isinstance(factor, tuple):
        for segment in factor:
            yield from segment.layers
