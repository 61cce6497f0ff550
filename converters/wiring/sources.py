"""The values of a followed computation: where they come from, and which weights read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import NoReturn

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.assembly import Use
from nfn_graph.converters.wiring.axes import (
    Layer,
    Segments,
    axis_size,
    layer_orders,
    layers_of,
    plain,
    resolve,
    solve,
)
from nfn_graph.converters.wiring.tape import Tape
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
    position_of,
)
from nfn_graph.data import PlacementAxis


class ValueSource:
    """Creates values, and records which layers the axes of the tensors belong to.

    Args:
        tensors: The checkpoint; only shapes and dtypes are read, never values.
        tied: The other keys of tensors with several keys, by the first key.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], tied: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.tensors = tensors
        self.tied = dict(tied or {})
        self.uses: dict[str, Use] = {}
        self.tape = Tape()
        self._orders = layer_orders()
        self._origins = count()
        self._claims: dict[tuple[int, int, int], Layer] = {}
        #: All activations, which determine the nesting of layers.
        self.values: list[Signal] = []
        #: Tensors whose entries are mixed along some axes before they are used.
        self.mixed: dict[str, None] = {}
        self._shown: list[Weight] = []
        self._rows: dict[str, tuple[str, tuple[int, int]]] = {}
        self._has_output = False
        self._output_axes: list[Segments] = []

    @contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Prefixes errors raised inside with their place: the name of a module or node."""
        try:
            yield
        except ConversionError as error:
            raise type(error)(f"{where}: {error}") from error

    def refuse(self, reason: str) -> NoReturn:
        """Raises an error because an operation of the network has no graph."""
        raise ConversionError(reason)

    def input(self, shape: Sizes | None = None) -> Opaque:
        """Creates an input of the network."""
        return Opaque(None if shape is None else tuple(shape), next(self._origins), True)

    def constant(self, shape: Sizes | None = (), *, is_uniform: bool = False) -> Opaque:
        """Creates a tensor that is not part of the checkpoint."""
        known = None if shape is None else tuple(shape)
        return Opaque(known, next(self._origins), is_uniform=is_uniform or known == ())

    def parameter(self, key: str) -> Weight:
        """Returns a tensor of the checkpoint."""
        if key not in self.tensors:
            raise ConversionError(f"Expected a tensor '{key}' in the checkpoint (got none)")
        shape = tuple(self.tensors[key].shape)
        return Weight(shape, ((key, tuple(range(len(shape)))),))

    def entry(self, weight: Weight, index: int) -> Weight:
        """Returns one entry of a stored tensor along its first axis, which gets its own layer.

        An example is a tensor that holds the directions of a recurrent network.
        """
        whole = self.rows(weight, index, index + 1)
        return Weight(whole.shape[1:], tuple((key, own[1:]) for key, own in whole.parts))

    def rows(self, weight: Weight, start: int, stop: int) -> Weight:
        """Returns the entries `start:stop` of a stored tensor along its first axis as a weight.

        An example is a tensor that holds the weights of queries, keys and values. All other entries
        must be used too, in any parts.
        """
        parts = []
        for part, own in weight.parts:
            key, (first, _) = self._rows.get(part, (part, (0, 0)))
            if not own or own[0] != 0:
                self.refuse(
                    f"Expected an unchanged stored tensor (got a view of '{part}' whose first axis "
                    f"is split)"
                )
            name = f"{key}[{first + start}:{first + stop}]"
            self._rows[name] = (key, (first + start, first + stop))
            parts.append((name, own))
        return Weight((stop - start, *weight.shape[1:]), tuple(parts))

    def opaque(self, values: Sequence[Value], shape: Sizes | None = None) -> Opaque:
        """Handles any parameter-free function of opaque values."""
        for value in values:
            if not isinstance(value, Opaque):
                raise ConversionError("Expected values without neurons (got an activation)")
        found = [v for v in values if isinstance(v, Opaque)]
        is_input = any(v.is_input for v in found)
        return Opaque(
            None if shape is None else tuple(shape),
            next(self._origins),
            is_input,
            tuple(layer for v in found for layer in v.exposes),
            None if is_input else next((v.key for v in found if v.key is not None), None),
        )

    def claim(self, x: Value, axis: int, size: int) -> Signal:
        """Returns a value with `size` neurons along an axis; inputs get their neurons here."""
        if isinstance(x, Signal):
            return x
        if isinstance(x, Weight):
            self.refuse("Expected an activation (got a tensor of the checkpoint)")
        self.expose(x)
        least = -axis if axis < 0 else axis + 1
        shape: Sizes = [None] * max(2, least) if x.shape is None else x.shape
        at = position_of(axis, len(shape))
        if shape[at] not in (None, size):
            self.refuse(f"Expected {size} input channels (got inputs of shape {list(shape)})")
        stored: list[Axis] = [Positions(n) for n in shape]
        stored[at] = NeuronAxis(plain(self._claimed_layer(x, len(shape) - at, size)))
        return Signal(tuple(stored), guessed=x.shape is None)

    def claim_axes(self, x: Opaque, axes: Sequence[int]) -> Signal:
        """Returns a value of known shape with neurons along axes."""
        shape = x.shape or ()
        stored: list[Axis] = [Positions(n) for n in shape]
        for at in axes:
            size = shape[at] or 0
            stored[at] = NeuronAxis(plain(self._claimed_layer(x, len(shape) - at, size)))
        return Signal(tuple(stored))

    def _claimed_layer(self, x: Opaque, axis: int, size: int) -> Layer:
        name = (x.origin, axis, size)
        # Equal numbers are the same to every reader, in any order.
        if name not in self._claims or x.is_uniform:
            layer = self.layer(size)
            layer.is_input, layer.is_fixed = x.is_input, not x.is_uniform
            self._claims[name] = layer
        return self._claims[name]

    def expose(self, x: Value) -> None:
        """Fixes the layers whose order a value reveals, because the value is used."""
        if isinstance(x, Opaque):
            for layer in layers_of(plain(*x.exposes)):
                # A single neuron has no order.
                layer.is_fixed |= layer.size > 1

    def show(self, weight: Weight) -> None:
        """Fixes the neurons along the axes of a weight, once the whole network is known."""
        self._shown.append(weight)

    def account(self, operands: Sequence[Value], results: Sequence[Value]) -> None:
        """Places weights that an operation reads without determining an axis.

        A single number becomes a tap of the network. Larger tensors are refused, because it is
        unknown which neurons they belong to.
        """
        going_on = {key for v in (*results, *self._shown) for key in _keys_of(v)}
        going_on.update(key for key, _ in self._rows.values())
        for operand in operands:
            for key in _keys_of(operand):
                if key in going_on or key in self.uses or key in self._rows:
                    continue
                if any(size != 1 for size in operand.shape or ()):
                    self.refuse(
                        f"Expected an operation whose effect on neurons is known for every tensor "
                        f"that it takes (got '{key}' {list(self.tensors[key].shape)} as one of its "
                        f"arguments)"
                    )
                self.use_of(key)

    def claimed(self, x: Opaque, like: Signal) -> Signal | None:
        """Returns an input of unknown shape whose neurons were claimed like those of a value."""
        at = like.neuron_axis
        size = None if at is None else like.shape[at]
        if at is None or size is None or (x.origin, like.rank - at, size) not in self._claims:
            return None
        return self.claim(self.ranked(x, like.rank), at, size)

    def claimed_size(self, x: Opaque, axis: int) -> int | None:
        """Returns the size with which a weight read an input along an axis, from the end."""
        sizes = {n for origin, at, n in self._claims if (origin, at) == (x.origin, axis)}
        return sizes.pop() if len(sizes) == 1 else None

    def ranked(self, x: Value, rank: int) -> Value:
        """Assumes a number of axes for an input of unknown shape."""
        if isinstance(x, Opaque) and x.shape is None:
            return replace(x, shape=(None,) * rank)
        return x

    def neurons(self, x: Signal, axis: int) -> Segments:
        """Returns the layers along an axis, which must be an axis of neurons."""
        found = x.axes[position_of(axis, x.rank)]
        if isinstance(found, SplitAxis):
            found.split.choose(found.index)
            found = x.axes[position_of(axis, x.rank)]
        if not isinstance(found, NeuronAxis):
            self.refuse(
                f"Expected the neurons along axis {axis} of an activation with {x.rank} axes "
                f"(got positions there, the neurons are at axis {x.neuron_axis})"
                + (". Pass an example_input" if x.guessed else "")
            )
        return resolve(found.segments)

    def annotate(self, x: Value, shape: Sizes) -> Value:
        """Adds the shape that the front-end knows to a value, and refuses a contradiction.

        The number of axes is no longer a guess after this: if it had been wrong, the shapes would
        differ.
        """
        known: Sizes = (None,) * len(shape) if x.shape is None else x.shape
        if isinstance(x, Weight):
            # Weights are not expanded. Their axes of size 1 are broadcast where they are used.
            known = [None if n == 1 else n for n in x.shape]
        if len(shape) != len(known) or any(
            None not in (a, b) and a != b for a, b in zip(known, shape, strict=True)
        ):
            self.refuse(
                f"Expected a result of shape {list(known)} (got {list(shape)}). The operation "
                f"changes its axes in an unknown way"
            )
        if isinstance(x, Opaque):
            return replace(x, shape=tuple(shape))
        if isinstance(x, Weight):
            return x
        stored: list[Axis] = []
        for axis, size in zip(x.stored, shape, strict=True):
            if isinstance(axis, Positions):
                stored.append(replace(axis, size=size))
            elif isinstance(axis, NeuronAxis) and size is not None:
                stored.append(NeuronAxis(solve(axis.segments, size)))
            else:
                stored.append(axis)
        return Signal(tuple(stored))

    def check_certain(self, x: Value, axes: Sequence[int]) -> None:
        """Refuses axes counted from the front of a value that may have further axes."""
        if isinstance(x, Signal) and x.guessed:
            for axis in axes:
                if axis > 0 or (axis == 0 and x.neuron_axis == 0):
                    self.refuse(
                        f"Expected an input of known shape, because axis {axis} may hold neurons "
                        f"or positions (got an unknown shape). Pass an example_input"
                    )

    def use(self, weight: Weight, axes: Sequence[tuple[PlacementAxis, Segments] | None]) -> None:
        """Records which layers the axes of a weight belong to; None for axes of taps."""
        for key, own in weight.parts:
            use = self.use_of(key)
            for size, axis, at in zip(weight.shape, axes, own, strict=True):
                if at is None:
                    continue
                if axis is None or (size == 1 and axis_size(axis[1]) != 1):
                    use.set_taps(at)
                else:
                    use.set_neurons(at, *axis)

    def use_of(self, key: str) -> Use:
        """Returns what is known about a tensor's axes."""
        if key not in self.uses:
            stored, rows = self._rows.get(key, (key, None))
            self.uses[key] = Use.of(stored, self.tensors[stored], rows)
        return self.uses[key]

    def fresh(self, size: int) -> NeuronAxis:
        """Returns an axis of new neurons."""
        return NeuronAxis(plain(self.layer(size)))

    def layer(self, size: int) -> Layer:
        """Returns a new layer of neurons."""
        return Layer(size, next(self._orders), values=self.values)


def _keys_of(x: Value) -> list[str]:
    """Returns the tensors of the checkpoint that a value consists of."""
    return [key for key, _ in x.parts] if isinstance(x, Weight) else []
