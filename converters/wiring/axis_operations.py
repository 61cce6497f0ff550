"""Operations without weights: entrywise operations, concatenation, slicing and reshaping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.axes import (
    Layer,
    Segments,
    axis_size,
    layers_of,
    plain,
    product,
    take,
)
from nfn_graph.converters.wiring.combination import broadcast
from nfn_graph.converters.wiring.reshaping import merge_axes, regroup
from nfn_graph.converters.wiring.sources import ValueSource
from nfn_graph.converters.wiring.ties import tie
from nfn_graph.converters.wiring.values import (
    Axis,
    NeuronAxis,
    Opaque,
    Positions,
    Signal,
    Sizes,
    SplitAxis,
    Value,
    Weight,
    open_axes,
    position_of,
    shown,
    with_axis,
)
from nfn_graph.data import PlacementAxis


class AxisOperations(ValueSource):
    """Operations on axes: entrywise operations, concatenation, slicing, reshaping."""

    def combine(self, first: Value, second: Value) -> Value:
        """Handles any entrywise operation on two values, with broadcasting: ties their neurons."""
        if isinstance(first, Opaque) and isinstance(second, Opaque):
            scalar = [v for v in (first, second) if v.shape == () and not (v.is_input or v.exposes)]
            if scalar:
                return second if scalar[0] is first else first
            exposed = [layers_of(plain(*v.exposes)) for v in (first, second)]
            if all([layer.size for layer in layers] == [1] for layers in exposed):
                # Single neurons whose axes were dropped, such as outputs that are added.
                tie(plain(*exposed[0]), plain(*exposed[1]))
            return self.opaque([first, second])
        return broadcast(self, first, second)

    def pointwise(self, x: Value) -> Value:
        """Handles any function of single entries."""
        return x

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenates values along one axis."""
        if all(isinstance(v, Opaque) for v in values):
            same = len({v.origin for v in values if isinstance(v, Opaque)}) == 1
            return self._moved(values[0]) if same else self.opaque(values)
        first = values[0]
        is_number = isinstance(first, Weight) and max(first.shape, default=1) == 1
        if is_number and all(value == first for value in values):
            return first  # A single number is broadcast wherever it is used.
        like = next((v for v in values if isinstance(v, Signal)), None)
        if like is None:
            self.refuse("Expected activations to concatenate (got tensors of the checkpoint)")
        guessed = all(v.guessed for v in values if isinstance(v, Signal))
        at = position_of(axis, like.rank)
        if guessed:
            self.check_certain(like, [axis])
        joined: list[Axis] = []
        result: Value = like
        whole = [self._beside(v, like, at) for v in values]
        if any(value.rank != like.rank for value in whole):
            self.refuse(
                f"Expected values with the same number of axes to concatenate (got "
                f"{[value.rank for value in whole]}). Pass an example_input"
            )
        for value in whole:
            joined.append(value.axes[at])
            if value is not like:
                aside = Signal(with_axis(value.stored, at, Positions(1)))
                result = self.combine(
                    Signal(with_axis(_act(result).stored, at, Positions(1))), aside
                )
        if all(isinstance(a, Positions) for a in joined):
            sizes = [a.size for a in joined]
            total = None if None in sizes else sum(s for s in sizes if s is not None)
            return Signal(with_axis(_act(result).stored, at, Positions(total)), guessed)
        segments = tuple(s for value in whole for s in self.neurons(value, at))
        return Signal(with_axis(_act(result).stored, at, NeuronAxis(segments)), guessed)

    def slice(self, x: Value, axis: int, start: int, stop: int | None, step: int = 1) -> Value:
        """Returns the entries `start:stop:step` of an axis; negative bounds count from the end."""
        if isinstance(x, Weight) and position_of(axis, x.rank) == 0 and step == 1:
            first, last, _ = slice(start, stop).indices(x.shape[0])
            return x if (first, last) == (0, x.shape[0]) else self.rows(x, first, last)
        if isinstance(x, Weight):
            at = position_of(axis, x.rank)
            return self._cut_taps(x, at, len(range(*slice(start, stop, step).indices(x.shape[at]))))
        if not isinstance(x, Signal):
            return self._unneeded(x)
        at = position_of(axis, x.rank)
        self.check_certain(x, [axis])
        found = x.axes[at]
        if isinstance(found, Positions):
            size = found.size
            new = None if size is None else len(range(*slice(start, stop, step).indices(size)))
            return replace(x, stored=with_axis(x.stored, at, Positions(new)))
        if isinstance(found, SplitAxis) and step == 1:
            return self._slice_split(x, at, start, stop)
        segments = self.neurons(x, at)
        size = axis_size(segments)
        if size is None:
            self.refuse(
                f"Expected an axis of known size to slice (got axis {axis}, whose size is not "
                f"known). Pass an example_input"
            )
        first, last, _ = slice(start, stop, step).indices(size)
        if (first, last, step) == (0, size, 1):
            return x
        if step != 1:
            if step < 0 or size % step or len(range(first, last, step)) != size // step:
                self.refuse(f"Expected a slice of neighbouring neurons (got step {step})")
            # One of the positions of each neuron, such as the even entries of rotary embeddings.
            layer = self.layer(size // step)
            tie(segments, product(layer, step))
            return replace(x, stored=with_axis(x.stored, at, NeuronAxis(plain(layer))))
        return replace(x, stored=with_axis(x.stored, at, NeuronAxis(take(segments, first, last))))

    def _cut_taps(self, x: Weight, at: int, size: int) -> Weight:
        """Takes some of the positions of a stored tensor, all of which become taps."""
        for key, own in x.parts:
            place = own[at]
            if place is not None and x.shape[at] != 1:
                self.use_of(key).set_taps(place)
        return replace(x, shape=(*x.shape[:at], size, *x.shape[at + 1 :]))

    def _slice_split(self, x: Signal, at: int, start: int, stop: int | None) -> Value:
        """Slices one axis of a reshape, such as the queries of packed heads."""
        found = x.axes[at]
        if not isinstance(found, SplitAxis):
            return x
        split = found.split
        if found.index:
            split.cut(found.index)
            return self.slice(x, at, start, stop)
        size, *rest = split.sizes
        first, last, _ = slice(start, stop).indices(size)
        inner = math.prod(rest)
        whole = take(split.segments, first * inner, last * inner)
        new = open_axes(whole, [last - first, *rest])
        stored = tuple(
            new[axis.index] if isinstance(axis, SplitAxis) and axis.split is split else axis
            for axis in x.axes
        )
        return replace(x, stored=stored)

    def repeat(self, x: Value, axis: int, times: int, *, is_tiled: bool = False) -> Value:
        """Repeats every entry of an axis consecutively, as for keys that heads share.

        Args:
            x: The value.
            axis: The axis.
            times: The number of repetitions.
            is_tiled: Whether the whole sequence of entries is repeated instead of every single
                entry.
        """
        if not isinstance(x, Signal):
            return self._unneeded(x)
        at = position_of(axis, x.rank)
        self.check_certain(x, [axis])
        own, copies = x.stored[at], Positions(times, is_copied=True)
        if isinstance(own, Positions) and own.size == 1:
            return replace(x, stored=with_axis(x.stored, at, copies))
        merged = merge_axes([copies, own] if is_tiled else [own, copies])
        return replace(x, stored=with_axis(x.stored, at, merged))

    def expand(self, x: Signal, shape: Sizes) -> Value:
        """Copies along axes of size 1, up to a shape; 1 and -1 leave an axis unchanged."""
        extra = max(0, len(shape) - x.rank)
        old = (*[Positions(1)] * extra, *x.axes)
        shape = (*[1] * (len(old) - len(shape)), *shape)
        wanted = [
            n if isinstance(axis, Positions) and n != -1 else 1
            for n, axis in zip(shape, old, strict=True)
        ]
        y = self.combine(x, self.constant(wanted))
        if not isinstance(y, Signal):
            return y
        stored = [
            Positions(axis.size, is_copied=before.size == 1 or before.is_copied)
            if isinstance(axis, Positions) and isinstance(before, Positions)
            else axis
            for axis, before in zip(y.stored, old, strict=True)
        ]
        return replace(y, stored=tuple(stored))

    def select(self, x: Value, axis: int, index: int) -> Value:
        """Selects one entry of an axis, which is dropped; entries of a weight are taps."""
        if isinstance(x, Opaque):
            return self.opaque([x])
        at = position_of(axis, x.rank)
        if isinstance(x, Weight):
            return self._cut_taps(x, at, 1).view([i for i in range(x.rank) if i != at])
        self.check_certain(x, [axis])
        if not isinstance(x.axes[at], Positions):
            stop = None if index == -1 else index + 1
            at -= x.rank
            return self.squeeze(self.slice(x, at, index, stop), at)
        return replace(x, stored=(*x.stored[:at], *x.stored[at + 1 :]))

    def flatten(self, x: Value, start: int = 0, stop: int = -1) -> Value:
        """Merges the axes from `start` to `stop`, both included."""
        if not isinstance(x, Signal):
            return self._unneeded(x)
        first, last = position_of(start, x.rank), position_of(stop, x.rank)
        if x.guessed and start > 0 and last == x.rank - 1:
            segments = self.neurons(x, -1) if start == 1 else ()
            if len(segments) != 1 or not isinstance(segments[0].factors[0], Layer):
                self.check_certain(x, [start])
            # There may be further axes between the batch and the features.
            return Signal((x.stored[0], NeuronAxis(product(None, segments))))
        merged = merge_axes(x.stored[first : last + 1])
        return replace(x, stored=(*x.stored[:first], merged, *x.stored[last + 1 :]))

    def reshape(self, x: Value, sizes: Sizes) -> Value:
        """Handles any reshape; -1 for a size that is inferred, None for an unknown one."""
        if isinstance(x, Weight):
            return x.view(_matching_axes(x.shape, sizes))
        if isinstance(x, Opaque):
            return self._unneeded(x)
        return Signal(regroup(x.stored, sizes))

    def unflatten(self, x: Value, axis: int, sizes: Sizes) -> Value:
        """Splits one axis into several; -1 for a size that is inferred."""
        if not isinstance(x, Signal):
            return self._unneeded(x)
        self.check_certain(x, [axis])
        at = position_of(axis, x.rank)
        parts = regroup([x.stored[at]], sizes)
        return replace(x, stored=(*x.stored[:at], *parts, *x.stored[at + 1 :]))

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        """Permutes the axes."""
        if isinstance(x, Opaque):
            return self._unneeded(x)
        if len(order) != x.rank:
            self.refuse(
                f"Expected an order of the {x.rank} axes (got {list(order)}). If the network "
                f"takes inputs with more axes, pass an example_input"
            )
        order = [position_of(i, x.rank) for i in order]
        if isinstance(x, Weight):
            return x.view(order)
        return Signal(tuple(x.stored[i] for i in order))

    def move(self, x: Value, axes: Sequence[int], places: Sequence[int]) -> Value:
        """Moves axes to other places and keeps the order of the rest: movedim, transpose."""
        if isinstance(x, Opaque):
            return self._unneeded(x)
        self.check_certain(x, [*axes, *places])
        origin = [position_of(i, x.rank) for i in axes]
        moved = dict(zip((position_of(i, x.rank) for i in places), origin, strict=True))
        rest = iter(i for i in range(x.rank) if i not in origin)
        y = self.permute(x, [moved[i] if i in moved else next(rest) for i in range(x.rank)])
        # Unlike the order of a permute, places do not determine the number of axes.
        return replace(y, guessed=_act(x).guessed) if isinstance(y, Signal) else y

    def unsqueeze(self, x: Value, axis: int) -> Value:
        """Adds an axis of size 1."""
        if isinstance(x, Opaque):
            if x.shape is None:
                return self._unneeded(x)
            at = position_of(axis, len(x.shape) + 1)
            return self._moved(x, (*x.shape[:at], 1, *x.shape[at:]))
        at = position_of(axis, x.rank + 1)
        if isinstance(x, Weight):
            return x.view([*range(at), None, *range(at, x.rank)])
        if axis > 1:
            self.check_certain(x, [axis])
        return replace(x, stored=(*x.stored[:at], Positions(1), *x.stored[at:]))

    def squeeze(self, x: Value, *axes: int) -> Value:
        """Drops the given axes if they have size 1, or all axes of size 1."""
        if isinstance(x, Opaque):
            return self._unneeded(x)
        given = [position_of(axis, x.rank) for axis in axes] or range(x.rank)
        if isinstance(x, Weight):
            return x.view([i for i in range(x.rank) if i not in given or x.shape[i] != 1])
        self.check_certain(x, axes)
        dropped = {i for i in given if x.shape[i] == 1}
        if not axes and None in x.shape[1:]:
            self.refuse(
                f"Expected known sizes to squeeze all axes (got {shown(x.shape)}). Pass an "
                f"example_input"
            )
        kept = tuple(axis for i, axis in enumerate(x.stored) if i not in dropped)
        if any(isinstance(axis, NeuronAxis | SplitAxis) for axis in kept):
            return replace(x, stored=kept)
        exposed = [
            layer
            for i in dropped
            if isinstance(x.axes[i], NeuronAxis)
            for layer in layers_of(self.neurons(x, i))
        ]
        return Opaque(
            tuple(axis.size for axis in kept), next(self._origins), exposes=tuple(exposed)
        )

    def _unneeded(self, x: Value) -> Value:
        """Returns the result of an operation without weights on a value without neurons."""
        if isinstance(x, Weight):
            self.refuse("Expected an activation (got a part of a tensor of the checkpoint)")
        return self._moved(x)

    def _moved(self, x: Value, shape: Sizes | None = None) -> Opaque:
        """Returns a value without neurons whose entries were repeated, or moved to other axes."""
        is_uniform = isinstance(x, Opaque) and x.is_uniform
        return replace(self.opaque([x], shape), is_uniform=is_uniform)

    def _beside(self, x: Value, like: Signal, axis: int) -> Signal:
        """Returns an operand of a concatenation as an activation."""
        if isinstance(x, Signal):
            return x
        if isinstance(x, Weight):
            return self._stored_beside(x, like, axis)
        if isinstance(like.axes[axis], Positions):
            at = next(i for i, a in enumerate(like.axes) if not isinstance(a, Positions))
        else:
            at = axis
        if x.shape is None:
            size = self.claimed_size(x, like.rank - at)
            x = replace(x, shape=(None,) * like.rank)
        else:
            size = x.shape[position_of(at, len(x.shape))]
        if size is None:
            self.refuse(
                "Expected known shapes to concatenate (got an input of unknown size). Pass an "
                "example_input"
            )
        return self.claim(x, at, size)

    def _stored_beside(self, x: Weight, like: Signal, axis: int) -> Signal:
        """Returns a stored tensor as an operand of a concatenation, with neurons of its own.
        If it is concatenated along positions, such as a class token before others, it has their
        neurons.
        """
        along = like.neuron_axis if isinstance(like.axes[axis], Positions) else axis
        if along is None or x.rank > like.rank:
            self.refuse(
                f"Expected a tensor that fits the activations it is concatenated with (got "
                f"{shown(x.shape)} beside {shown(like.shape)})"
            )
        x = x.broadcast(like.rank)
        segments = plain(self.layer(x.shape[along])) if along == axis else self.neurons(like, along)
        if axis_size(segments) != x.shape[along]:
            self.refuse(
                f"Expected a tensor with {axis_size(segments)} entries along axis {along} to "
                f"concatenate (got {shown(x.shape)})"
            )
        roles: list[tuple[PlacementAxis, Segments] | None] = [None] * x.rank
        roles[along] = ("neuron", segments)
        self.use(x, roles)
        stored: tuple[Axis, ...] = tuple(Positions(size) for size in x.shape)
        return Signal(with_axis(stored, along, NeuronAxis(segments)), like.guessed)


def _act(x: Value) -> Signal:
    if not isinstance(x, Signal):
        raise ConversionError("Expected an activation (got a value without neurons)")
    return x


def _matching_axes(old: Sequence[int], new: Sizes) -> list[int | None]:
    """Matches the axes of a weight for a reshape that only adds or drops axes of size 1."""
    axes = [i for i, n in enumerate(old) if n != 1]
    sizes = [n for n in new if n != 1]
    if len(sizes) != len(axes) or any(
        n not in (-1, None, old[i]) for n, i in zip(sizes, axes, strict=True)
    ):
        raise ConversionError(
            f"Expected a stored tensor to keep its axes (got a reshape from {list(old)} to "
            f"{list(new)})"
        )
    left = iter(axes)
    return [None if n == 1 else next(left) for n in new]
