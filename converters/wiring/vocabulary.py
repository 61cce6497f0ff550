"""Operations with weights, and the network as a whole."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.assembly import build_layout
from nfn_graph.converters.wiring.axes import (
    Segments,
    axis_size,
    layers_of,
    plain,
    product,
    resolve,
    solve,
)
from nfn_graph.converters.wiring.combination import broadcast
from nfn_graph.converters.wiring.reductions import Reductions
from nfn_graph.converters.wiring.ties import tie
from nfn_graph.converters.wiring.values import (
    NeuronAxis,
    Opaque,
    Positions,
    Signal,
    SplitAxis,
    Value,
    Weight,
    layers_in,
    position_of,
    with_axis,
)
from nfn_graph.data import Layout, PlacementAxis
from nfn_graph.messages import UserError


class Wiring(Reductions):
    """Follows the computation of one network; see :mod:`nfn_graph.converters.wiring`.

    Args:
        tensors: The tensors of the checkpoint. Only their shapes and dtypes are read.
        tied: The other keys of tensors with several keys, by the first key.

    Example:
        >>> import torch
        >>> from nfn_graph.converters.wiring import Wiring
        >>> wiring = Wiring({"a": torch.zeros(4, 3), "b": torch.zeros(2, 4)})
        >>> hidden = wiring.linear(wiring.input(), wiring.parameter("a"))
        >>> wiring.output(wiring.linear(wiring.pointwise(hidden), wiring.parameter("b")))
        >>> [(p.keys[0], p.store) for p in wiring.layout().placements]
        [('a', ('input', 'weight', 'hidden1')), ('b', ('hidden1', 'weight', 'output'))]
    """

    def linear(
        self,
        x: Value,
        weight: Weight,
        bias: Value | None = None,
        *,
        axis: int = -1,
        target: int = 0,
        source: int = 1,
    ) -> Signal:
        """Handles a linear map of the neurons along `axis` by a weight with axes target and source.

        All other axes of the weight are taps, such as the entries of a kernel.
        """
        if weight.rank < 2:
            self.refuse(f"Expected a weight [out, in, ...] (got {list(weight.shape)})")
        x = self._with_channels(self.claim(x, axis, weight.shape[source]), axis)
        axis = position_of(axis, x.rank)
        known = solve(self.neurons(x, axis), weight.shape[source])
        layer = self.layer(weight.shape[target])
        roles: list[tuple[PlacementAxis, Segments] | None] = [None] * weight.rank
        roles[target], roles[source] = ("target", plain(layer)), ("source", known)
        self.use(weight, roles)
        y = Signal(with_axis(x.stored, axis, NeuronAxis(plain(layer))), x.guessed)
        # The products before the sum have source and target neurons and are values too. Creating
        # the value records it.
        Signal((*x.stored, y.stored[axis]))
        return y if bias is None else self.channelwise(y, [bias], axis)

    def conv(
        self,
        x: Value,
        weight: Weight,
        bias: Value | None = None,
        *,
        groups: int = 1,
        transposed: bool = False,
    ) -> Signal:
        """Handles a convolution.

        The weight is `[out, in / groups, *kernel]`, or transposed `[in, out / groups, *kernel]`.
        """
        if weight.rank < 2:
            self.refuse(f"Expected a kernel [out, in, ...] (got {list(weight.shape)})")
        spatial = weight.rank - 2
        axis = -1 - spatial
        channels = weight.shape[0] if transposed else weight.shape[1] * groups
        if groups == 1:
            y = self.linear(
                self.ranked(x, spatial + 2),
                weight,
                axis=axis,
                target=int(transposed),
                source=int(not transposed),
            )
        else:
            x = self._with_channels(self.claim(self.ranked(x, spatial + 2), axis, channels), axis)
            y = self._grouped(x, weight, axis, groups, transposed)
        if isinstance(x, Signal):
            # Neurons after a single channel are its positions.
            behind = x.neuron_axis if x.axes[axis] == Positions(1) else None
            self.mixes(x, [i for i in range(x.rank - spatial, x.rank) if i != behind])
        positions = [Positions()] * spatial
        y = Signal((*y.stored[: y.rank - spatial], *positions), y.guessed)
        return y if bias is None else self.channelwise(y, [bias], axis)

    def _grouped(
        self, x: Signal, weight: Weight, axis: int, groups: int, transposed: bool
    ) -> Signal:
        """Handles a convolution with channels nested in groups and connected only inside."""
        channels = weight.shape[0] if transposed else weight.shape[1] * groups
        outputs = weight.shape[1] * groups if transposed else weight.shape[0]
        if groups < 1 or channels % groups or outputs % groups:
            self.refuse(
                f"Expected groups that divide the numbers of channels (got {groups} groups of "
                f"{channels} and {outputs} channels)"
            )
        known = solve(self.neurons(x, axis), channels)
        inner = channels // groups
        parts: list[Segments] = []
        if inner == 1 and not (transposed and len(known) > 1):
            # Every channel is a group, whichever layer it belongs to.
            parts = [(segment,) for segment in known]
            source: Segments | None = None
        else:
            group, inside = self.layer(groups), self.layer(inner)
            tie(known, product(group, inside))
            parts, source = [plain(group)], plain(inside)
        made = []
        inside_groups: Segments = ()
        for part in parts:
            inside_groups = plain(self.layer(outputs // groups)) if outputs > groups else ()
            made.append(product(part, inside_groups or 1))
        target = tuple(segment for part in made for segment in part)
        roles: list[tuple[PlacementAxis, Segments] | None] = [None] * weight.rank
        if transposed:
            roles[0] = ("source" if source else "neuron", known)
            roles[1] = ("target" if source else "neuron", inside_groups) if inside_groups else None
        else:
            roles[0] = ("target" if source else "neuron", target)
            roles[1] = ("source", source) if source else None
        self.use(weight, roles)
        return replace(x, stored=with_axis(x.stored, position_of(axis, x.rank), NeuronAxis(target)))

    def _with_channels(self, x: Signal, axis: int) -> Signal:
        """Returns a value whose neurons a weight reads along an axis.

        If this axis has one entry and the neurons are along another axis, as in a signal of one
        channel computed by a linear layer, they become the positions of a single neuron.
        """
        at, along = position_of(axis, x.rank), x.neuron_axis
        if along is None or at == along or x.axes[at] != Positions(1):
            return x
        size, layer = x.shape[along], self.layer(1)
        tie(self.neurons(x, along), product(layer, size))
        stored = with_axis(x.stored, along, Positions(size))
        return replace(x, stored=with_axis(stored, at, NeuronAxis(plain(layer))))

    def matmul(self, first: Value, second: Value) -> Value:
        """Handles a product with a stored matrix, or with another value along positions."""
        if isinstance(second, Weight) and second.rank == 2 and not isinstance(first, Weight):
            return self.linear(first, second, target=1, source=0)
        if isinstance(first, Weight) and first.rank == 2 and not isinstance(second, Weight):
            return self.linear(second, first, axis=self._column_axis(second))
        if isinstance(second, Weight) and second.rank == 1 and not isinstance(first, Weight):
            y = self.linear(first, second.view([0, None]), target=1, source=0)
            return self.squeeze(y, -1)
        if isinstance(first, Weight) and first.rank == 1 and not isinstance(second, Weight):
            axis = self._column_axis(second)
            return self.squeeze(self.linear(second, first.view([None, 0]), axis=axis), axis)
        if isinstance(first, Opaque) and isinstance(second, Opaque):
            return self.opaque([first, second])
        if isinstance(first, Opaque) and isinstance(second, Signal):
            return self._along_positions(second, first, -2)
        if isinstance(first, Signal) and isinstance(second, Opaque):
            return self._along_positions(first, second, -1)
        if (
            isinstance(first, Signal)
            and isinstance(second, Signal)
            and min(first.rank, second.rank) > 1
        ):
            rank = max(first.rank, second.rank) - 2
            batch = string.ascii_lowercase[:rank]
            names = (batch[rank + 2 - first.rank :] + "xy", batch[rank + 2 - second.rank :] + "yz")
            return self.contract(first, second, names, batch + "xz")
        if isinstance(first, Weight) != isinstance(second, Weight):
            stored, x = (first, second) if isinstance(first, Weight) else (second, first)
            if isinstance(stored, Weight) and x.shape is not None and len(x.shape) == stored.rank:
                batch = string.ascii_lowercase[: stored.rank - 2]
                return self.contract(first, second, (batch + "xy", batch + "yz"), batch + "xz")
        self.refuse(
            "Expected a product of an activation with a stored matrix or with another activation "
            "(got a matmul of two stored tensors, or of vectors, which has no graph of weights)"
        )

    def _column_axis(self, x: Signal | Opaque) -> int:
        """Returns the axis that a matrix on the left reads; a vector has no batch axis."""
        if x.shape is None:
            self.refuse(
                "Expected a value of known shape, because a matrix may be multiplied by a vector "
                "or by a matrix of columns (got an unknown shape). Pass an example_input"
            )
        return -min(2, len(x.shape))

    def _along_positions(self, x: Signal, matrix: Opaque, axis: int) -> Value:
        """Handles a product with a matrix or vector without neurons, along an axis of positions."""
        if matrix.shape is None or x.rank < 2:
            self.refuse(
                "Expected known shapes in a matmul of values (got a value of unknown shape). Pass "
                "an example_input"
            )
        self.mixes(x, [axis])
        at = position_of(axis, x.rank)
        if len(matrix.shape) == 1:
            self.expose(matrix)
            return replace(x, stored=(*x.stored[:at], *x.stored[at + 1 :]))
        y = replace(x, stored=with_axis(x.stored, at, Positions(matrix.shape[axis])))
        # Several matrices are broadcast over the axes before the last two.
        return self.combine(y, replace(matrix, shape=(*matrix.shape[:-2], 1, 1)))

    def channelwise(self, x: Value, parameters: Sequence[Value], axis: int) -> Signal:
        """Handles entrywise operations with vectors along one axis, such as norm parameters.
        An `axis` that is not negative is counted from the front. A vector that is not part of the
        checkpoint fixes the neurons.
        """
        for parameter in parameters:
            shape = parameter.shape
            if isinstance(parameter, Signal) or shape is None or len(shape) != 1:
                self.refuse(
                    f"Expected a stored vector (got a computed value or shape {shape and [*shape]})"
                )
            if shape[0] is None:
                self.refuse(
                    "Expected a vector of known size (got an unknown one). Pass an example_input"
                )
            x = self.claim(x, axis, shape[0])
            if x.guessed and axis >= 0 and axis != x.neuron_axis:
                self.refuse(
                    f"Expected an input with a known number of axes (got {x.rank} or more). Pass "
                    f"an example_input"
                )
            behind = x.rank - position_of(axis, x.rank) - 1
            vector = (
                parameter.view([0, *[None] * behind])
                if isinstance(parameter, Weight)
                else replace(parameter, shape=(*shape, *[1] * behind))
            )
            y = broadcast(self, x, vector)
            x = y if isinstance(y, Signal) else x
        if not isinstance(x, Signal):
            self.refuse("Expected at least one tensor of the checkpoint (got none)")
        return x

    def channel_norm(self, x: Value, parameters: Sequence[Value]) -> Value:
        """Handles statistics of each channel, stored or computed: batch norm, instance norm."""
        if isinstance(x, Signal) and x.rank > 1 and isinstance(x.axes[1], SplitAxis):
            self.neurons(x, 1)
        y = self.channelwise(x, parameters, 1) if parameters else x
        others = [i for i in range(y.rank) if i != 1] if isinstance(y, Signal) else []
        return self.statistics(y, others)

    def layer_norm(self, x: Value, parameters: Sequence[Value], num_axes: int) -> Value:
        """Handles statistics over the last `num_axes` axes, with parameters of their shape."""
        if num_axes > 1 and parameters and isinstance(x, Opaque) and x.shape is None:
            # A batch of images or signals is assumed. A single axis might be that of tokens
            # instead.
            x = replace(x, shape=(None, *(parameters[0].shape or ())))
        return reduce(self.combine, parameters, self.statistics(x, range(-num_axes, 0)))

    def group_norm(self, x: Value, groups: int, parameters: Sequence[Value] = ()) -> Value:
        """Handles statistics over groups of channels, axis 1; channels are nested in them."""
        y = self.channelwise(x, parameters, 1) if parameters else x
        if not isinstance(y, Signal):
            return y
        channels = y.shape[1]
        if groups == 1:
            return self.statistics(y, range(1, y.rank))
        if channels is None or channels % groups:
            self.refuse(
                f"Expected GroupNorm with groups that divide the channels (got {groups} groups of "
                f"{channels} channels)"
            )
        if groups < channels:
            inner = channels // groups
            known = solve(self.neurons(y, 1), channels)
            sizes = [segment.size or 0 for segment in known]
            if any(size % inner for size in sizes):
                sizes = [channels]
            # Concatenated layers have their own groups.
            made = [self.layer(size // inner) for size in sizes]
            parts = [product(group, self.layer(inner)) for group in made]
            tie(known, tuple(segment for part in parts for segment in part))
            # The statistics of each group.
            grouped = Signal(with_axis(y.stored, 1, NeuronAxis(plain(*made))))
            self.statistics(grouped, range(2, y.rank))
        return self.statistics(y, range(2, y.rank))

    def contract(self, first: Value, second: Value, names: tuple[str, str], output: str) -> Value:
        """Handles a product of two values, with a letter for every axis as in `einsum`.

        Axes with the same letter are the same neurons or positions; letters missing from the output
        are summed over. In a stored tensor, letters missing from the other value are new neurons,
        and letters missing from the output are the neurons that it reads.
        """
        if isinstance(first, Opaque) and isinstance(second, Opaque):
            return self.opaque([first, second])
        if isinstance(first, Weight) and not isinstance(second, Weight):
            return self._weighted(second, first, (names[1], names[0]), output)
        if isinstance(second, Weight) and not isinstance(first, Weight):
            return self._weighted(first, second, names, output)
        if isinstance(first, Weight) or isinstance(second, Weight):
            self.refuse(
                "Expected a product with one stored tensor (got a product of two stored ones, "
                "which has no graph of weights)"
            )
        letters = list(dict.fromkeys(names[0] + names[1]))
        aligned = [
            self._aligned(x, own, letters) for x, own in zip((first, second), names, strict=True)
        ]
        y = self.combine(*aligned)
        if not isinstance(y, Signal):
            return y
        gone = [i for i, letter in enumerate(letters) if letter not in output]
        z = self.reduce(y, gone) if gone else y
        left = [letter for letter in letters if letter in output]
        order = [left.index(letter) for letter in output]
        if isinstance(z, Opaque) and z.shape is not None:
            return replace(z, shape=tuple(z.shape[i] for i in order))
        return self.permute(z, order)

    def _aligned(self, x: Value, own: str, letters: Sequence[str]) -> Value:
        """Returns a value with one axis for each letter, of size 1 if it does not have it."""
        if x.shape is None or len(x.shape) != len(own):
            self.refuse(
                f"Expected a value with {len(own)} axes in a product (got "
                f"{'unknown ones' if x.shape is None else len(x.shape)}). Pass an example_input"
            )
        if isinstance(x, Opaque):
            sizes = dict(zip(own, x.shape, strict=True))
            return self.opaque([x], [sizes.get(letter, 1) for letter in letters])
        order = [letter for letter in letters if letter in own]
        y = self.permute(x, [own.index(letter) for letter in order])
        for place, letter in enumerate(letters):
            if letter not in own:
                y = self.unsqueeze(y, place)
        return y

    def _weighted(self, x: Value, weight: Weight, names: tuple[str, str], output: str) -> Value:
        """Handles a product with a stored tensor of any number of axes."""
        own, stored = names
        if any(letter not in own and letter not in output for letter in stored):
            self.refuse("Expected a stored tensor that is not summed over (got an axis that is)")
        reading = [letter for letter in stored if letter in own and letter not in output]
        if not reading:
            self.refuse(
                "Expected a stored tensor that reads the neurons along an axis (got a product that "
                "sums over none of its axes)"
            )
        for letter in reading:
            x = self.claim(x, own.index(letter) - len(own), weight.shape[stored.index(letter)])
        if not isinstance(x, Signal) or x.rank != len(own):
            self.refuse("Expected a value with known axes in a product. Pass an example_input")
        self.settle(x, [own.index(letter) for letter in own if letter in stored])
        roles: list[tuple[PlacementAxis, Segments] | None] = []
        axes = dict(zip(own, x.stored, strict=True))
        for letter, size in zip(stored, weight.shape, strict=True):
            if letter not in own:
                axes[letter] = self.fresh(size)
                roles.append(("target", plain(*layers_of(axes[letter].segments))))  # type: ignore[union-attr]
            elif isinstance(axis := x.axes[own.index(letter)], Positions):
                roles.append(None)
                axes[letter] = Positions(axis.size)
            else:
                known = solve(self.neurons(x, own.index(letter)), size)
                roles.append(("source" if letter in reading else "target", known))
        self.use(weight, roles)
        Signal(tuple(axes.values()))  # The products before the sum, as in `linear`.
        return Signal(tuple(axes[letter] for letter in output))

    def output(self, x: Value) -> None:
        """Records an output of the network, whose neurons keep their order."""
        self._has_output = True
        if isinstance(x, Weight):
            self.show(x)
            return
        if isinstance(x, Signal) and len(x.neuron_axes) == 1:
            self._output_axes.append(self.neurons(x, x.neuron_axes[0]))
        layers = layers_in(x) if isinstance(x, Signal) else layers_of(plain(*x.exposes))
        for layer in layers:
            layer.is_output = True

    def layout(self) -> Layout:
        """Returns the layout. Tensors that the network does not use are carried along."""
        if not self._has_output:
            raise ConversionError("Expected a network with an output (got none)")
        for weight in self._shown:
            for key, own in weight.parts:
                self._fix_shown(key, own)
        self._join_rows()
        self._check_rows()
        try:
            return build_layout(
                self.uses, self.tensors, self.tied, self.values, self.mixed, self.tape
            )
        except ConversionError:
            raise
        except UserError as error:  # The parts were found one by one and may not fit together.
            raise ConversionError(
                f"Expected neurons that a graph has a place for (got a network that splits its "
                f"layers in several ways that do not fit together: {error}). Convert its parts "
                f"separately"
            ) from error

    def _join_rows(self) -> None:
        """Merges rows of a tensor into larger parts of it that are used too; ties neurons."""
        for name, small in list(self.uses.items()):
            bounds = small.row_bounds
            for key, large in self.uses.items():
                first, last = large.row_bounds
                if (
                    small.key == large.key
                    and key != name
                    and first <= bounds[0] < bounds[1] <= last
                ):
                    large.absorb(small)
                    del self.uses[name]
                    if name in self.mixed:
                        self.mixed[key] = None
                    break

    def _check_rows(self) -> None:
        """Refuses tensors with rows that are not used, or that are used in several parts."""
        rows: dict[str, list[tuple[int, int]]] = {}
        for use in self.uses.values():
            rows.setdefault(use.key, []).append(use.row_bounds)
        for key, found in rows.items():
            bounds = [n for pair in sorted(found) for n in pair]
            size = (*self.tensors[key].shape, 1)[0]
            if bounds[0] != 0 or bounds[-1] != size or bounds[1:-1:2] != bounds[2::2]:
                raise ConversionError(
                    f"Expected every row of '{key}' to be used in one place (got rows "
                    f"{sorted(found)} of {size})"
                )

    def _fix_shown(self, key: str, own: Sequence[int | None]) -> None:
        """Fixes the neurons along the axes of a weight that the network returns.

        A weight that belongs to no neurons, such as the logarithm of a policy's standard deviation,
        becomes a tap of the output neurons if it has one entry for each, and a tap of the network
        otherwise.
        """
        is_free = key not in self.uses
        use = self.use_of(key)
        for layer in (
            layer
            for axis in own
            if axis is not None
            for layer in layers_of(use.neurons[axis] or ())
        ):
            layer.is_fixed = True
        large = [axis for axis, size in enumerate(use.shape) if size != 1]
        if is_free and len(large) == 1:
            outputs = {resolve(axis) for axis in self._output_axes}
            fitting = [axis for axis in outputs if axis_size(axis) == use.shape[large[0]]]
            if len(fitting) == 1:
                use.set_neurons(large[0], "neuron", fitting[0])
