"""The words for operations with weights, and for a network as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.wiring.assembly import build_layout
from nfn_graph.converters.wiring.axes import Segments, layers_of, plain, solve
from nfn_graph.converters.wiring.axis_operations import AxisOperations
from nfn_graph.converters.wiring.combination import broadcast
from nfn_graph.converters.wiring.values import (
    Activation,
    Neurons,
    Opaque,
    Positions,
    Value,
    Weight,
    position_of,
    with_axis,
)
from nfn_graph.layout import Layout, PlacementAxis


class Wiring(AxisOperations):
    """Follows one network; see :mod:`nfn_graph.converters.wiring`.

    Args:
        tensors: The checkpoint; shapes and dtypes are read, never values.
        tied: Further keys of the same tensor, by the key that stands for it.
    """

    _has_output = False

    def linear(
        self,
        x: Value,
        weight: Weight,
        bias: Value | None = None,
        *,
        axis: int = -1,
        target: int = 0,
        source: int = 1,
    ) -> Activation:
        """A linear map of the neurons along `axis`, by a weight with axes target and source.

        All other axes of the weight are taps: the entries of a kernel.
        """
        x = self.claim(x, axis, weight.shape[source])
        axis = position_of(axis, x.rank)
        known = solve(self.neurons(x, axis), weight.shape[source])
        layer = self.layer(weight.shape[target])
        roles: list[tuple[PlacementAxis, Segments] | None] = [None] * weight.rank
        roles[target], roles[source] = ("target", plain(layer)), ("source", known)
        self.use(weight, roles)
        y = Activation(with_axis(x.stored, axis, Neurons(plain(layer))), x.guessed)
        return y if bias is None else self.channelwise(y, [bias], axis)

    def conv(
        self,
        x: Value,
        weight: Weight,
        bias: Value | None = None,
        *,
        groups: int = 1,
        transposed: bool = False,
    ) -> Activation:
        """A convolution, `weight` `[out, in / groups, *kernel]`, or transposed
        `[in, out / groups, *kernel]`."""
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
        elif groups == channels:
            x = self.claim(self.ranked(x, spatial + 2), axis, channels)
            segments = solve(self.neurons(x, axis), channels)
            copies = weight.shape[1] if transposed else weight.shape[0] // groups
            spread = tuple(replace(s, after=(s.after or 1) * copies) for s in segments)
            own: Segments = segments if transposed else spread
            self.use(weight, [("neuron", own), *[None] * (weight.rank - 1)])
            y = Activation(with_axis(x.stored, position_of(axis, x.rank), Neurons(spread)))
        else:
            self.refuse(
                f"Expected a convolution with 1 group or with as many as its {channels} input "
                f"channels (got {groups} groups). Its symmetry is smaller: channels of "
                f"different groups cannot be exchanged one by one"
            )
        positions = [Positions()] * spatial
        y = Activation((*y.stored[: y.rank - spatial], *positions), y.guessed)
        return y if bias is None else self.channelwise(y, [bias], axis)

    def channelwise(self, x: Value, parameters: Sequence[Value], axis: int) -> Activation:
        """Entrywise operations with vectors along one axis: norm parameters, statistics, bias.

        An axis from the front is meant if `axis` is not negative.
        """
        for parameter in parameters:
            if not isinstance(parameter, Weight):
                self.refuse("Expected a tensor of the checkpoint (got a computed one)")
            if parameter.rank != 1:
                self.refuse(f"Expected a vector (got shape {list(parameter.shape)})")
            x = self.claim(x, axis, parameter.shape[0])
            if x.guessed and axis >= 0 and axis != x.neuron_axis:
                self.refuse("Expected to know how many axes the input has. Give an example_input")
            behind = x.rank - position_of(axis, x.rank) - 1
            x = broadcast(self, x, parameter.view([0, *[None] * behind]))
        if not isinstance(x, Activation):
            self.refuse("Expected at least one tensor of the checkpoint (got none)")
        return x

    def output(self, x: Value) -> None:
        """An output of the network: its neurons keep their order."""
        self._has_output = True
        if isinstance(x, Opaque):
            layers = list(x.exposes)
        elif isinstance(x, Weight):
            layers = []
            self.use(x, [None] * x.rank)
        else:
            layers = [
                layer
                for axis in x.axes
                if not isinstance(axis, Positions)
                for layer in layers_of(
                    axis.segments if isinstance(axis, Neurons) else axis.split.segments
                )
            ]
        for layer in layers:
            layer.root.is_output = True

    def layout(self, carried: Mapping[str, Tensor] | None = None) -> Layout:
        """Where all tensors went. Those that the network does not use are carried along."""
        if not self._has_output:
            raise ConversionError("Expected a network with an output (got none)")
        return build_layout(self.uses, self.tensors, self.tied, carried)
