"""The NF-Layer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nfn_graph.features._features import WeightFeatures
from nfn_graph.features._fold import Levels
from nfn_graph.features._incidence import Incidence
from nfn_graph.nn._batch_rows import BatchRows
from nfn_graph.nn._checks import check_choice, check_features, check_folded
from nfn_graph.nn._fused import fused_layer
from nfn_graph.nn._message_passing import apply_maps, message_passing
from nfn_graph.nn._steps import Maps, Values
from nfn_graph.nn._wiring import Wiring
from nfn_graph.ops._backends import current_backend
from nfn_graph.ops._precision import autocast_dtype
from nfn_graph.ops._segments import Reduce
from nfn_graph.spec._checks import check_count
from nfn_graph.spec._sites import NETWORK, Bundle, FoldedSpec
from nfn_graph.spec._types import module_name


class NFLinear(nn.Module):
    r"""The complete equivariant linear layer of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (section 2.2; appendix B for NP, C for HNP), as message
    passing on three levels:

    .. math::
        \text{network} \quad g' &= N\,[\text{means of all weights}, \text{means of all
            neurons}, g] + b \\
        \text{neuron} \quad v'_j &= M_l\,[v_j, W_{j,\star}, W_{\star,j}, \ldots]
            + g'\text{'s message} \\
        \text{weight} \quad W'_{jk} &= D_t\,W_{jk} + \text{messages of neurons } j
            \text{ and } k + g'\text{'s message}

    Every map's output is split into the level's own new features and one message for each
    level it speaks to. The layer has one parameter per orbit of the group on pairs of
    entries, so it is every equivariant linear map and no other:
    :math:`f(\sigma U) = \sigma f(U)`. Whether the group is NP or HNP is the spec's matter.

    Args:
        spec: The folded spec of the features.
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        bias: Whether to add a constant per output tap and channel.
        pointwise: Whether to drop all aggregates and messages (the paper's NFN_PT).
        reduce: `"mean"` or `"sum"`, the paper's :math:`\star`.
        max_parameters: The size above which the layer refuses to be built.

    Shapes:
        - input: features of `spec` with `in_channels`.
        - output: features of `spec` with `out_channels`.
    """

    def __init__(
        self,
        spec: FoldedSpec,
        in_channels: int,
        out_channels: int,
        bias: bool = True,
        pointwise: bool = False,
        reduce: Reduce = "mean",
        max_parameters: int = 2**28,
    ) -> None:
        super().__init__()
        self.spec = check_folded(spec)
        self.in_channels = check_count(in_channels, 1, "in_channels")
        self.out_channels = check_count(out_channels, 1, "out_channels")
        self.pointwise = pointwise
        self.reduce: Reduce = check_choice(reduce, ("mean", "sum"))
        self._check_size(max_parameters)
        self.weights = nn.ParameterDict(
            {
                module_name(bundle.key): self._map(bundle.taps, self._read_taps(bundle))
                for bundle in spec.bundles
            }
        )
        self.neurons = nn.ParameterDict(
            {
                neuron.name: self._map(taps, taps)
                for neuron in spec.neurons
                if (taps := self._neuron_taps(neuron.name))
            }
        )
        taps = self._network_taps()
        self.network = nn.Parameter(self._map(taps, taps))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(spec.summary_taps * out_channels))
        self._wiring = Wiring.of(spec)
        self._names = [module_name(bundle.key) for bundle in spec.bundles]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(fan-in); the fan-in counts all maps that add into an output."""
        spec, neurons = self.spec, {n.name: self._neuron_taps(n.name) for n in self.spec.neurons}
        top = 0 if self.pointwise else self._network_taps()
        # The taps that add into an output of each type, over all levels.
        into_weights = {
            bundle.key: self._read_taps(bundle)
            + (0 if self.pointwise else neurons[bundle.target] + neurons[bundle.source] + top)
            for bundle in spec.bundles
        }
        into_neurons = {name: taps + top for name, taps in neurons.items()}
        own = [into_neurons[neuron.name] for neuron in spec.neurons]
        with torch.no_grad():
            for bundle in spec.bundles:
                self._fill(self.weights[module_name(bundle.key)], [into_weights[bundle.key]])
            for neuron in spec.neurons:
                if neuron.name not in self.neurons:
                    continue
                fans = [(neuron.taps, into_neurons[neuron.name])]
                if not self.pointwise:
                    fans += [(b.taps, into_weights[b.key]) for b, _ in spec.incident[neuron.name]]
                self._fill_rows(self.neurons[neuron.name], fans)
            everywhere = [
                *((bundle.taps, into_weights[bundle.key]) for bundle in spec.bundles),
                *((n.taps, fan) for n, fan in zip(spec.neurons, own, strict=True)),
                (spec.network_taps, self._network_taps()),
            ]
            self._fill_rows(self.network, everywhere[-1:] if self.pointwise else everywhere)
            if self.bias is not None:
                self._fill_rows(self.bias, everywhere)

    def forward(self, features: WeightFeatures) -> WeightFeatures:
        """Applies the layer."""
        features = check_features(features, self.spec, self.in_channels)
        values, maps = self.values(features), self.maps()
        if self.pointwise:
            return self._output(features, self._pointwise(values, maps))
        if current_backend() == "torch":
            batch = self.scaled_rows(features.incidence, values.network.dtype)
            return self._output(features, fused_layer(message_passing, batch, values, maps))
        batch = self.rows(features.incidence)
        return self._output(features, message_passing(batch, values, maps))

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        kind = "pointwise, " if self.pointwise else ""
        return f"{self.in_channels} -> {self.out_channels}, {kind}{self.spec}"

    def values(self, features: WeightFeatures) -> Values:
        """The input, in the order of the spec's types; of the edges what there is of them."""
        values = Values(
            [features.weights[b.key].flatten(1) for b in self.spec.bundles if features.weights],
            [features.neurons[n.name].flatten(1) for n in self.spec.neurons],
            features.network[NETWORK].flatten(1),
        )
        # Autocast does not look into the fused layer.
        dtype = autocast_dtype(values.network.device)
        return values if dtype is None else values.to(dtype)

    def maps(self) -> Maps:
        """The parameters, in the order of the spec's types."""
        maps = Maps(
            [self.weights[name] for name in self._names],
            [self.neurons.get(n.name) for n in self.spec.neurons],
            self.network,
            self.bias,
        )
        dtype = autocast_dtype(self.network.device)
        return maps if dtype is None else maps.to(dtype)

    def constants(self, maps: Maps) -> Sequence[Tensor | None]:
        """The constant term of every type, in the order of the spec's taps."""
        taps = self.spec.taps
        if maps.bias is None:
            return [None] * len(taps)
        return maps.bias.split([count * self.out_channels for count in taps.values()])

    def rows(self, incidence: Incidence) -> BatchRows:
        """Which rows of a batch belong together."""
        return BatchRows.of(incidence, self.spec, self._wiring, self.reduce == "mean")

    def scaled_rows(self, incidence: Incidence, dtype: torch.dtype) -> BatchRows:
        """The same for the steps of :mod:`nfn_graph.nn._steps`, which do not divide but scale."""
        return self.rows(incidence).with_scales(incidence, self.spec, dtype)

    def _pointwise(self, values: Values, maps: Maps) -> Values:
        tensors = (*values.weights, *values.neurons, values.network)
        matrices = (*maps.weights, *maps.neurons, maps.network)
        new = apply_maps(tensors, matrices, self.constants(maps))
        count = len(maps.weights)
        return Values(new[:count], new[count:-1], new[-1])

    def _output(self, features: WeightFeatures, values: Values) -> WeightFeatures:
        taps = self.spec.taps
        tensors = (*values.weights, *values.neurons, values.network)
        tapped = {
            key: x.view(x.shape[0], count, self.out_channels)
            for (key, count), x in zip(taps.items(), tensors, strict=True)
        }
        return features.replace(
            Levels(
                {b.key: tapped[b.key] for b in self.spec.bundles},
                {n.name: tapped[n.name] for n in self.spec.neurons},
                {NETWORK: tapped[NETWORK]},
            )
        )

    def _map(self, out_taps: int, in_taps: int) -> Tensor:
        return torch.empty(out_taps * self.out_channels, in_taps * self.in_channels)

    def _read_taps(self, bundle: Bundle) -> int:
        return bundle.taps if self.pointwise else bundle.read_taps

    def _neuron_taps(self, name: str) -> int:
        if self.pointwise:
            return next(n.taps for n in self.spec.neurons if n.name == name)
        return self.spec.neuron_summary_taps[name]

    def _network_taps(self) -> int:
        return self.spec.network_taps if self.pointwise else self.spec.summary_taps

    def _fill(self, parameter: Tensor, fan: list[int]) -> None:
        bound = 1 / math.sqrt(fan[0] * self.in_channels)
        parameter.uniform_(-bound, bound)

    def _fill_rows(self, parameter: Tensor, fans: list[tuple[int, int]]) -> None:
        """Fills blocks of rows, given as (output taps, fan-in taps)."""
        parts = parameter.split([taps * self.out_channels for taps, _ in fans])
        for part, (taps, fan) in zip(parts, fans, strict=True):
            if taps:
                self._fill(part, [fan])

    def _check_size(self, limit: int) -> None:
        pair = self.in_channels * self.out_channels
        sizes: dict[str, int] = {
            f"weight type {b.key}": b.taps * self._read_taps(b) * pair for b in self.spec.bundles
        }
        for neuron in self.spec.neurons:
            taps = self._neuron_taps(neuron.name)
            sizes[f"neuron type '{neuron.name}'"] = taps**2 * pair
        sizes["the network level"] = self._network_taps() ** 2 * pair
        total = sum(sizes.values())
        if total > limit:
            largest = max(sizes, key=sizes.__getitem__)
            raise ValueError(
                f"Expected a layer of at most {limit:,} parameters (got {total:,}, of which "
                f"{sizes[largest]:,} at {largest}). HNP grows with the square of fixed sizes: "
                f"use 'np' with IOEncoding, fewer channels, or raise max_parameters."
            )
