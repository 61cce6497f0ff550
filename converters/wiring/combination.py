"""Entrywise operations on two values: which axes, and therefore which neurons, they share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import Segments, axis_size, plain, solve
from nfn_graph.converters.wiring.ties import tie
from nfn_graph.converters.wiring.values import (
    Axis,
    NeuronAxis,
    Opaque,
    Positions,
    Signal,
    SplitAxis,
    Value,
    Weight,
    distinct,
    settled,
    shown,
)
from nfn_graph.data import PlacementAxis

if TYPE_CHECKING:
    from nfn_graph.converters.wiring.sources import ValueSource

_HINT = "Pass an example_input, so that the shapes are known"


def broadcast(wiring: ValueSource, first: Value, second: Value) -> Value:
    """Returns the result of an entrywise operation; neurons on a common axis are tied."""
    wiring.expose(first)
    wiring.expose(second)
    if isinstance(first, Weight) and isinstance(second, Weight):
        return _both_weights(first, second)
    if isinstance(first, Weight):
        first, second = second, first
    if isinstance(first, Opaque) and isinstance(second, Signal):
        first, second = second, first
    if isinstance(second, Weight):
        if isinstance(first, Opaque):
            return _opaque_and_weight(wiring, first, second)
        if isinstance(first, Signal):
            return _activation_and_weight(wiring, first, second)
    if isinstance(first, Signal) and isinstance(second, Opaque):
        return _activation_and_opaque(wiring, first, second)
    if isinstance(first, Signal) and isinstance(second, Signal):
        return _both_activations(first, second)
    raise ConversionError("Expected an activation (got values without neurons)")


def _both_weights(first: Weight, second: Weight) -> Weight:
    rank = max(first.rank, second.rank)
    first, second = first.broadcast(rank), second.broadcast(rank)
    shape = tuple(max(a, b) for a, b in zip(first.shape, second.shape, strict=True))
    parts = []
    for weight in (first, second):
        for key, own in weight.parts:
            # An axis of size 1 that is broadcast belongs to no neurons.
            kept = tuple(
                None if a == 1 and b != 1 else i
                for i, a, b in zip(own, weight.shape, shape, strict=True)
            )
            parts.append((key, kept))
    return Weight(shape, tuple(dict.fromkeys(parts)))


def _opaque_and_weight(wiring: ValueSource, x: Opaque, weight: Weight) -> Value:
    large = [i for i, size in enumerate(weight.shape) if size != 1]
    if not large:
        wiring.use(weight, [None] * weight.rank)
        missing = 0 if x.shape is None else max(0, weight.rank - len(x.shape))
        return replace(x, shape=None if x.shape is None else (*(1,) * missing, *x.shape))
    if x.shape == ():
        if x.is_input:
            raise ConversionError(
                f"Expected no scalar input beside a tensor of the checkpoint (got one beside "
                f"{list(weight.shape)})"
            )
        return weight
    if not x.is_input and x.shape is not None and all(n == 1 for n in x.shape):
        return weight
    if not x.is_input:
        beside = _weight_by_constant(wiring, x.shape, weight)
        if beside is not None:
            return beside
        what = "a constant" if x.key is None else f"'{x.key}', a mask or another integer tensor,"
        raise ConversionError(
            f"Expected a tensor of the checkpoint to be combined with a constant along other axes "
            f"(got {what} of shape {list(x.shape or ())} beside {list(weight.shape)}). Store a "
            f"mask as a floating-point buffer, which becomes part of the graph, or multiply it "
            f"into the weight"
        )
    axis = large[0] - weight.rank
    if x.shape is not None and len(x.shape) >= -axis and x.shape[axis] == 1:
        raise ConversionError(
            f"Expected a tensor with one entry along axis {axis} of an input of shape "
            f"{list(x.shape)} (got {list(weight.shape)}). Differences between the input and "
            f"several stored points, as in radial basis functions, have no graph of weights"
        )
    # Parameters of a norm have no batch axis, but statistics of an input have one.
    rank = weight.rank + (weight.shape[0] != 1)
    claimed = wiring.claim(wiring.ranked(x, rank), axis, weight.shape[axis])
    guess = Signal(claimed.stored, guessed=x.shape is None)
    return _activation_and_weight(wiring, guess, weight)


def _weight_by_constant(
    wiring: ValueSource, shape: tuple[int | None, ...] | None, weight: Weight
) -> Signal | None:
    """Combines a stored vector with a constant along other axes, as ALiBi does.

    The entries of the vector, such as the slopes of heads, are neurons. The entries of the
    constant, such as distances, are positions.
    """
    if shape is None:
        return None
    rank = max(len(shape), weight.rank)
    weight, shape = weight.broadcast(rank), (*(1,) * (rank - len(shape)), *shape)
    large = [i for i, size in enumerate(weight.shape) if size != 1]
    if len(large) != 1 or shape[large[0]] != 1:
        return None
    segments = plain(wiring.layer(weight.shape[large[0]]))
    wiring.use(weight, [("neuron", segments) if i in large else None for i in range(rank)])
    return Signal(
        tuple(NeuronAxis(segments) if i in large else Positions(n) for i, n in enumerate(shape))
    )


def _activation_and_weight(wiring: ValueSource, x: Signal, weight: Weight) -> Signal:
    if weight.rank > x.rank:
        raise ConversionError(
            f"Expected a tensor with at most {x.rank} axes (got {list(weight.shape)}). {_HINT}"
        )
    weight = weight.broadcast(x.rank)
    _choose(x, [size != 1 for size in weight.shape])
    stored = list(x.stored)
    roles: list[tuple[PlacementAxis, Segments] | None] = []
    for i, (axis, size) in enumerate(zip(x.axes, weight.shape, strict=True)):
        role: tuple[PlacementAxis, Segments] | None = None
        if isinstance(axis, NeuronAxis):
            segments = wiring.neurons(x, i)
            if size != 1 and axis_size(segments) is None:
                segments = solve(segments, size)
                stored[i] = NeuronAxis(segments)
            if size != 1 and axis_size(segments) == 1:
                segments = plain(wiring.layer(size))
                stored[i] = NeuronAxis(segments)
            if size not in (1, axis_size(segments)):
                raise ConversionError(
                    f"Expected a tensor with {axis.size} entries along axis {i} "
                    f"(got {list(weight.shape)})"
                )
            role = ("neuron", segments)
        elif isinstance(axis, Positions) and size != 1:
            stored[i] = Positions(size if axis.size == 1 else axis.size)
        roles.append(role)
    wiring.use(weight, roles)
    return Signal(tuple(stored), x.guessed)


def _activation_and_opaque(wiring: ValueSource, x: Signal, other: Opaque) -> Signal:
    if other.shape is None:
        known = wiring.claimed(other, x)
        if known is not None:
            return _both_activations(x, known)
        raise ConversionError(
            f"Expected known shapes for an activation combined with an input (got an input of "
            f"unknown shape). {_HINT}"
        )
    if len(other.shape) > x.rank:
        extra = (Positions(n) for n in other.shape[: len(other.shape) - x.rank])
        x = replace(x, stored=(*extra, *x.stored))
    shape = (*(1,) * (x.rank - len(other.shape)), *other.shape)
    _choose(x, [size != 1 for size in shape])
    along = [
        i
        for i in x.neuron_axes
        if shape[i] != 1 and x.shape[i] != 1 and not (other.is_uniform and shape[i] == x.shape[i])
    ]
    if any(shape[i] is None for i in along):
        raise ConversionError(
            f"Expected known shapes along neurons (got {shown(other.shape)}). {_HINT}"
        )
    if along:
        sizes = tuple(n if i in along or i not in x.neuron_axes else 1 for i, n in enumerate(shape))
        return _both_activations(x, wiring.claim_axes(replace(other, shape=sizes), along))
    stored = [
        Positions(n) if isinstance(axis, Positions) and axis.size == 1 else axis
        for axis, n in zip(x.stored, shape, strict=True)
    ]
    found = Signal(tuple(stored), x.guessed)
    return (
        found if other.is_uniform else distinct(found, [i for i, n in enumerate(shape) if n != 1])
    )


def _both_activations(first: Signal, second: Signal) -> Signal:
    rank = max(first.rank, second.rank)
    first, second = _padded(first, rank), _padded(second, rank)
    _choose(first, [isinstance(axis, NeuronAxis) for axis in second.axes])
    _choose(second, [isinstance(axis, NeuronAxis) for axis in first.axes])
    _nest_apart(first, second)
    stored = [
        _common_axis(i, a, b) for i, (a, b) in enumerate(zip(first.axes, second.axes, strict=True))
    ]
    return Signal(tuple(stored), first.guessed or second.guessed)


def _nest_apart(first: Signal, second: Signal) -> None:
    """Settles reshapes of both values unless all of their axes match one another."""
    for a, b in zip(first.axes, second.axes, strict=True):
        if not (isinstance(a, SplitAxis) and isinstance(b, SplitAxis)):
            continue
        places = [
            [
                axis.index if isinstance(axis, SplitAxis) and axis.split is split else None
                for axis in x
            ]
            for x, split in ((first.axes, a.split), (second.axes, b.split))
        ]
        if places[0] != places[1] or a.split.sizes != b.split.sizes:
            for part in (a, b):
                if part.split.axes is None:
                    part.split.nest()


def _common_axis(i: int, a: Axis, b: Axis) -> Axis:
    a, b = settled(a), settled(b)
    if isinstance(a, SplitAxis) and isinstance(b, SplitAxis):
        # Axes that were reshaped in the same way may stay open.
        if a.split is not b.split:
            tie(a.split.segments, b.split.segments)
        return a
    if isinstance(a, Positions) and isinstance(b, Positions):
        size = (
            b.size
            if a.size == 1
            else a.size
            if b.size in (1, None) or a.size is not None
            else b.size
        )
        return Positions(size, all(n.is_copied or n.size == 1 for n in (a, b)))
    if isinstance(a, Positions):
        a, b = b, a
    if isinstance(b, Positions):
        if b.size == 1 or (b.is_copied and a.size != 1):
            return a
        if a.size == 1 and b.size is not None and isinstance(a, NeuronAxis):
            return b
        raise ConversionError(
            f"Expected the neurons of both operands on the same axis (got neurons and "
            f"{'?' if b.size is None else b.size} positions along axis {i}). {_HINT}"
        )
    for axis in (a, b):
        if isinstance(axis, SplitAxis):
            axis.split.nest()
            return _common_axis(i, a, b)
    segments = [axis.segments for axis in (a, b) if isinstance(axis, NeuronAxis)]
    if (a.size == 1) != (b.size == 1):
        return b if a.size == 1 else a
    if a.size is None or b.size is None:
        raise ConversionError(
            f"Expected known shapes along neurons (got {shown([a.size, b.size])} along axis {i}). "
            f"{_HINT}"
        )
    tie(*segments)
    return a


def _choose(x: Signal, wanted: list[bool]) -> None:
    """Settles which axis of a reshape holds the neurons, if the other operand determines it."""
    for axis, is_wanted in zip(x.axes, wanted, strict=True):
        if isinstance(axis, SplitAxis) and is_wanted and axis.size != 1 and axis.split.axes is None:
            axis.split.nest()


def _padded(x: Signal, rank: int) -> Signal:
    return Signal((*[Positions(1)] * (rank - x.rank), *x.stored), x.guessed)
