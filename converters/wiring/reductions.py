"""Operations along axes: symmetric functions, and operations that depend on the order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from nfn_graph.converters.wiring.axes import Segment, layers_of
from nfn_graph.converters.wiring.axis_operations import AxisOperations
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
    distinct,
    layers_in,
    position_of,
    with_axis,
)


class Reductions(AxisOperations):
    """Operations along axes: means, norms, maxima and their positions, pooling."""

    def reduce(self, x: Value, axes: Sequence[int] | None = None, keepdim: bool = False) -> Value:
        """Handles a symmetric function along axes, such as a mean; along all axes if None.

        Along the neurons, the result is a value without neurons.
        """
        if isinstance(x, Opaque):
            return self.opaque([x])
        gone = set(range(x.rank) if axes is None else (position_of(i, x.rank) for i in axes))
        if isinstance(x, Weight):
            self._mix(x, gone)
            order = [None if i in gone else i for i in range(x.rank) if keepdim or i not in gone]
            return x.view(order)
        self.check_certain(x, axes or [])
        self.settle(x, list(gone))
        kept: list[Axis] = []
        for i, axis in enumerate(x.stored):
            if i not in gone:
                kept.append(axis)
            elif keepdim:
                kept.append(Positions(1))
        if any(isinstance(axis, NeuronAxis | SplitAxis) for axis in kept):
            return replace(x, stored=tuple(kept))
        return Opaque(tuple(axis.size for axis in kept), next(self._origins))

    def places(
        self, x: Value, axes: Sequence[int] | None = None, keepdim: bool = False
    ) -> Signal | Opaque:
        """Handles functions that return positions along axes, such as argmax.

        Along positions, every neuron has its own result. Along the neurons, the result depends on
        their order, so they are fixed if it is used.
        """
        if isinstance(x, Weight):
            self.show(x)
            return self.constant(None)
        found = self.reduce(x, axes, keepdim)
        if isinstance(x, Signal) and isinstance(found, Signal):
            gone = range(x.rank) if axes is None else [position_of(i, x.rank) for i in axes]
            if any(not isinstance(x.axes[i], Positions) for i in gone):
                found = Opaque(found.shape, next(self._origins))
        if isinstance(found, Opaque) and isinstance(x, Signal):
            return replace(found, exposes=tuple(layers_in(x)))
        return found if isinstance(found, Signal) else self.opaque([x])

    def largest(self, x: Value, axis: int, size: int | None) -> tuple[Value, Value]:
        """Handles the `size` largest or smallest entries along an axis, and their positions."""
        if isinstance(x, Weight):
            self.refuse("Expected a weight whose entries stay in place (got one that is sorted)")
        values, places = self.reduce(x, [axis], True), self.places(x, [axis], True)
        return self._resized(values, axis, size), self._resized(places, axis, size)

    def statistics(self, x: Value, axes: Sequence[int] | None = None) -> Value:
        """Handles a symmetric function that keeps its axes: softmax, the statistics of a norm.

        It runs along all axes if `axes` is None.
        """
        if isinstance(x, Weight):
            every = range(x.rank)
            self._mix(x, set(every if axes is None else (position_of(i, x.rank) for i in axes)))
        if isinstance(x, Signal) and axes is not None:
            is_open = any(isinstance(axis, SplitAxis) for axis in x.axes)
            if is_open or len(x.neuron_axes) > 1:
                # Its result depends on all entries along these axes, as a mean does.
                self.reduce(x, axes)
        return x

    def _mix(self, x: Weight, along: set[int]) -> None:
        """Records that a function mixes the entries of a stored tensor along some of its axes."""
        large = {i for i, size in enumerate(x.shape) if size != 1}
        if large & along and large - along:
            self.mixed.update(dict.fromkeys(key for key, _ in x.parts))

    def pool(self, x: Value, spatial: int, sizes: Sizes | None = None) -> Signal | Opaque:
        """Handles operations that mix positions along the last `spatial` axes and may resize."""
        if isinstance(x, Weight):
            self.refuse("Expected an activation (got a tensor of the checkpoint)")
        if isinstance(x, Opaque):
            return replace(x, shape=None)
        channels = -spatial - 1
        if x.rank >= -channels and isinstance(x.axes[channels], SplitAxis):
            self.neurons(x, channels)
        self.mixes(x, range(-spatial, 0))
        new = [Positions(n) for n in (sizes or [None] * spatial)]
        return replace(x, stored=(*x.stored[: x.rank - spatial], *new))

    def mixes(self, x: Value, axes: Sequence[int] | None = None) -> Value:
        """Handles operations that mix or move entries along axes and keep sizes: flip, cumsum.

        They run along all axes if `axes` is None.
        """
        if isinstance(x, Weight):
            self.refuse("Expected a weight whose entries stay in place (got one that is moved)")
        if isinstance(x, Signal):
            self.settle(x, range(x.rank) if axes is None else axes)
            for axis in range(x.rank) if axes is None else axes:
                if not self.is_placed(x, axis):
                    self.refuse(
                        "Expected an operation along positions (got one along the neurons, whose "
                        "result depends on their order)"
                    )
            return distinct(x, range(x.rank) if axes is None else axes)
        return x

    def is_placed(self, x: Signal, axis: int) -> bool:
        """Whether an axis holds positions, or can be turned into positions here."""
        found = x.axes[position_of(axis, x.rank)]
        if isinstance(found, SplitAxis):
            found.split.nest()
            found = x.axes[position_of(axis, x.rank)]
        if isinstance(found, NeuronAxis):
            layers = layers_of(found.segments)
            if not all(layer.is_loose for layer in layers):
                return False
            for layer in layers:
                layer.refined = (Segment((layer.size,)),)
        return True

    def settle(self, x: Signal, axes: Sequence[int]) -> None:
        """Settles a reshape if an operation runs along only some of its axes.

        An example is an operation along the last two axes after `unflatten(1, (8, 4, 4))`.
        """
        chosen = {position_of(axis, x.rank) for axis in axes}
        whole = _whole_splits(x, chosen)
        for at in chosen - whole:
            axis = x.axes[at]
            if isinstance(axis, SplitAxis):
                axis.split.nest()

    def _resized(self, x: Value, axis: int, size: int | None) -> Value:
        """Changes the size of an axis of size 1."""
        if isinstance(x, Signal):
            return replace(
                x, stored=with_axis(x.stored, position_of(axis, x.rank), Positions(size))
            )
        if isinstance(x, Opaque) and x.shape is not None:
            at = position_of(axis, len(x.shape))
            return replace(x, shape=(*x.shape[:at], size, *x.shape[at + 1 :]))
        return x


def _whole_splits(x: Signal, axes: Collection[int]) -> set[int]:
    """Returns the given axes whose reshape has all of its parts among them."""
    splits = [axis.split for i in axes if isinstance(axis := x.axes[i], SplitAxis)]
    return {
        i
        for i in axes
        if isinstance(axis := x.axes[i], SplitAxis)
        and sum(split is axis.split for split in splits) == len(axis.split.sizes)
    }
