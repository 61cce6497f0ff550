"""The values of a followed computation, with what is known about the axes of each tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Union

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import (
    Layer,
    Segments,
    axis_size,
    layers_of,
    plain,
    product,
    resolve,
)
from nfn_graph.converters.wiring.ties import tie

Axis = Union["Positions", "NeuronAxis", "SplitAxis"]


@dataclass(frozen=True)
class Positions:
    """An axis without neurons: batch, time, space.

    Args:
        size: The number of entries; None if unknown.
        is_copied: Whether all entries are copies of one, so that they have no order. Operations
            that treat them differently must reset it; see :func:`distinct`.

    Example:
        >>> from nfn_graph.converters.wiring import Positions
        >>> Positions(28).size, Positions().size
        (28, None)
    """

    size: int | None = None
    is_copied: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class NeuronAxis:
    """An axis of neurons, layer after layer.

    Example:
        >>> import torch
        >>> from nfn_graph.converters.wiring import NeuronAxis, Wiring
        >>> wiring = Wiring({"a": torch.zeros(4, 3), "b": torch.zeros(2, 4)})
        >>> hidden = wiring.linear(wiring.input(), wiring.parameter("a"))
        >>> axis = hidden.axes[-1]
        >>> isinstance(axis, NeuronAxis), axis.size
        (True, 4)
    """

    segments: Segments

    @property
    def size(self) -> int | None:
        """The number of entries."""
        return axis_size(resolve(self.segments))


@dataclass(eq=False)
class Split:
    """A neuron axis that was reshaped into several axes, the reverse of a flatten.

    The meaning of these axes is determined when one of them is used. All of them are then settled
    at once.

    Args:
        segments: The axis that was reshaped.
        sizes: The sizes of the axes that it was reshaped into.
        axes: The settled axes; None while they are open.
    """

    segments: Segments
    sizes: tuple[int, ...]
    axes: tuple[Axis, ...] | None = None

    def choose(self, index: int) -> None:
        """Settles one axis as neurons and the others as positions."""
        layer = self._layer(self.sizes[index], index)
        before, after = math.prod(self.sizes[:index]), math.prod(self.sizes[index + 1 :])
        tie(self.segments, product(before, layer, after))
        found: list[Axis] = [Positions(size) for size in self.sizes]
        found[index] = NeuronAxis(plain(layer))
        self.axes = tuple(found)

    def nest(self) -> None:
        """Settles all axes as neurons: heads and the dimensions inside them."""
        layers = {i: self._layer(n, i) for i, n in enumerate(self.sizes) if n != 1}
        tie(self.segments, product(*layers.values()))
        self.axes = tuple(
            NeuronAxis(plain(layers[i])) if i in layers else Positions(1)
            for i in range(len(self.sizes))
        )

    def cut(self, index: int) -> None:
        """Separates the axes before an index from the rest; both parts stay open."""
        outer = self._layer(math.prod(self.sizes[:index]), 0)
        inner = self._layer(math.prod(self.sizes[index:]), 1)
        tie(self.segments, product(outer, inner))
        self.axes = (
            *open_axes(plain(outer), self.sizes[:index]),
            *open_axes(plain(inner), self.sizes[index:]),
        )

    def _layer(self, size: int, index: int) -> Layer:
        first = layers_of(self.segments)[0]
        return Layer(size, (*first.order, index), is_loose=True, values=first.values)


@dataclass(frozen=True)
class SplitAxis:
    """One of the axes of a :class:`Split`.

    Example:
        >>> import torch
        >>> from nfn_graph.converters.wiring import SplitAxis, Wiring
        >>> wiring = Wiring({"a": torch.zeros(4, 3), "b": torch.zeros(2, 4)})
        >>> hidden = wiring.linear(wiring.input(), wiring.parameter("a"))
        >>> parts = wiring.reshape(hidden, (-1, 2, 2)).axes[-2:]  # heads, or positions
        >>> [isinstance(part, SplitAxis) for part in parts], [part.size for part in parts]
        ([True, True], [2, 2])
    """

    split: Split
    index: int

    @property
    def size(self) -> int | None:
        """The number of entries."""
        return self.split.sizes[self.index]


def open_axes(segments: Segments, sizes: Sequence[int]) -> list[Axis]:
    """Returns the axes into which a reshape splits an axis of neurons; they may stay open."""
    large = [i for i, size in enumerate(sizes) if size != 1] or [0]
    found: list[Axis] = [Positions(1)] * len(sizes)
    if len(large) == 1:
        found[large[0]] = NeuronAxis(segments)
        return found
    whole = Split(segments, tuple(sizes))
    return [SplitAxis(whole, i) for i in range(len(sizes))]


Sizes = Sequence[int | None]


@dataclass(frozen=True, eq=False)
class Signal:
    """A tensor computed by the network, with one or more axes of neurons.

    Args:
        stored: Its axes as they were found; `axes` are the same axes as they are known now.
        guessed: Whether there may be further axes between those of the batch and of the neurons, so
            that only axes counted from the end are certain.

    Example:
        >>> import torch
        >>> from nfn_graph.converters.wiring import Signal, Wiring
        >>> wiring = Wiring({"a": torch.zeros(4, 3), "b": torch.zeros(2, 4)})
        >>> hidden = wiring.linear(wiring.input(), wiring.parameter("a"))
        >>> isinstance(hidden, Signal), hidden.axes[-1].size
        (True, 4)
    """

    stored: tuple[Axis, ...]
    guessed: bool = False

    def __post_init__(self) -> None:
        # The nesting of neurons depends on all values that hold them.
        for layer in layers_in(self)[:1]:
            layer.values.append(self)

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, as they are known now."""
        return tuple(settled(axis) for axis in self.stored)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.stored)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The sizes; None if unknown."""
        return tuple(axis.size for axis in self.axes)

    @property
    def neuron_axis(self) -> int | None:
        """The first axis of neurons, None if a reshape has left it open."""
        return next(iter(self.neuron_axes), None)

    @property
    def neuron_axes(self) -> list[int]:
        """The axes that are known to hold neurons."""
        return [i for i, axis in enumerate(self.axes) if isinstance(axis, NeuronAxis)]


@dataclass(frozen=True, eq=False)
class Opaque:
    """A tensor without axes of permutable neurons: an input, or a value computed from inputs only.

    Args:
        shape: Its sizes, None if unknown.
        origin: The number of its source. Values of one origin that are read along the same axis are
            the same input neurons.
        is_input: Whether it comes from the network's inputs. Otherwise it comes from constants, or
            from a whole layer by a symmetric function such as a mean over its neurons.
        exposes: Layers whose order it reveals, as the position of a maximum does. They are fixed if
            the value is used. Layers of a single neuron whose axis was dropped are included.
        key: A tensor of the checkpoint that is not a weight, such as an integer mask, from which it
            was computed without any input.
        is_uniform: Whether all of its entries are one number, so that it reveals no order.

    Example:
        >>> from nfn_graph.converters.wiring import Opaque, Signal
        >>> issubclass(Opaque, Signal)  # a value without neurons, such as a constant or a count
        False
    """

    shape: tuple[int | None, ...] | None
    origin: int
    is_input: bool = False
    exposes: tuple[Layer, ...] = ()
    key: str | None = None
    is_uniform: bool = False


@dataclass(frozen=True)
class Weight:
    """A view of a stored tensor, or of several that were combined entry by entry.

    Args:
        shape: The sizes of this view.
        parts: The keys, each with the tensor's own axis for every axis of the view (None if it has
            none).

    Example:
        >>> import torch
        >>> from nfn_graph.converters.wiring import Weight, Wiring
        >>> wiring = Wiring({"a": torch.zeros(4, 3), "b": torch.zeros(2, 4)})
        >>> weight = wiring.parameter("a")
        >>> isinstance(weight, Weight), weight.shape
        (True, (4, 3))
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int | None, ...]], ...] = field(default=())

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def view(self, axes: Sequence[int | None]) -> Weight:
        """Returns the same entries with axes permuted, dropped (of size 1) or added (None)."""
        return Weight(
            tuple(1 if i is None else self.shape[i] for i in axes),
            tuple(
                (key, tuple(None if i is None else own[i] for i in axes)) for key, own in self.parts
            ),
        )

    def broadcast(self, rank: int) -> Weight:
        """Adds axes of size 1 in front, up to a number of axes."""
        return self.view([*[None] * (rank - self.rank), *range(self.rank)])


Value = Signal | Opaque | Weight


def position_of(axis: int, rank: int) -> int:
    """Counts an axis from the front.

    Example:
        >>> from nfn_graph.converters.wiring import position_of
        >>> position_of(-1, 3), position_of(1, 3)
        (2, 1)
    """
    if not -rank <= axis < rank:
        raise ConversionError(
            f"Expected an axis of a tensor with {rank} axes (got axis {axis}). If the network "
            f"takes inputs with other axes than [batch, features], pass an example_input"
        )
    return axis % rank


def num_entries(sizes: Iterable[int | None]) -> int | None:
    """Returns the product of sizes; None if one of them is unknown."""
    total = 1
    for size in sizes:
        if size is None:
            return None
        total *= size
    return total


def shown(sizes: Sizes) -> str:
    """Formats sizes for an error, with a question mark for unknown ones."""
    return f"[{', '.join('?' if size is None else str(size) for size in sizes)}]"


def layers_in(x: Signal) -> list[Layer]:
    """Returns the layers of a value's neurons, as far as they are known now."""
    return [
        layer
        for axis in x.axes
        if not isinstance(axis, Positions)
        for layer in layers_of(
            axis.segments if isinstance(axis, NeuronAxis) else axis.split.segments
        )
    ]


def distinct(x: Signal, along: Sequence[int]) -> Signal:
    """Marks entries along some axes as no longer being copies of each other."""
    places = {position_of(axis, x.rank) for axis in along}
    return replace(
        x,
        stored=tuple(
            Positions(axis.size) if i in places and isinstance(axis, Positions) else axis
            for i, axis in enumerate(x.stored)
        ),
    )


def with_axis(axes: tuple[Axis, ...], at: int, axis: Axis) -> tuple[Axis, ...]:
    """Replaces one axis."""
    return (*axes[:at], axis, *axes[at + 1 :])


def settled(axis: Axis) -> Axis:
    """Returns an axis as it is known now."""
    while isinstance(axis, SplitAxis) and axis.split.axes is not None:
        axis = axis.split.axes[axis.index]
    if isinstance(axis, NeuronAxis) and axis.segments and not layers_of(axis.segments):
        return Positions(axis.size)
    return axis
