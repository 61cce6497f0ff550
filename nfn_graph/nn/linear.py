"""The NF-Layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nfn_graph.features import WeightFeatures
from nfn_graph.fold import Levels
from nfn_graph.folded import NETWORK, Bundle, FoldedSpec
from nfn_graph.nn.checks import check_features, check_folded, check_reduce
from nfn_graph.ops import Reduce, divide_by_count, edge_update, segment_sum, with_transposed
from nfn_graph.spec import Key, WeightKey, module_name
from nfn_graph.summary import network_summary


class NFLinear(nn.Module):
    r"""The complete equivariant linear layer of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (Eq. 3 and Eq. 8, Tables 6 to 10), as message passing
    on three levels:

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
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.pointwise = pointwise
        self.reduce: Reduce = check_reduce(reduce, ("mean", "sum"))
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
        return self._pointwise(features) if self.pointwise else self._full(features)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        kind = "pointwise, " if self.pointwise else ""
        return f"{self.in_channels} -> {self.out_channels}, {kind}{self.spec}"

    def _full(self, features: WeightFeatures) -> WeightFeatures:
        spec, incidence = self.spec, features.incidence
        target_sums, means = self._neuron_means(features)
        summary = network_summary(features, spec, self.reduce, target_sums)
        message = torch.nn.functional.linear(summary, self.network, self.bias)
        from_network = self._split_summary(message)
        neurons: dict[str, Tensor] = {}
        to_edges: dict[tuple[WeightKey, str], Tensor] = {}
        for neuron in spec.neurons:
            name, incident = neuron.name, spec.incident[neuron.name]
            own = features.neurons[name].flatten(1)
            read = torch.cat([own, *(means[b.key, end] for b, end in incident)], 1)
            parts = [neuron.taps, *(b.taps for b, _ in incident)]
            if sum(parts) == 0:
                neurons[name] = own.new_empty(own.shape[0], 0)
                continue
            new, *messages = (read @ self.neurons[name].t()).split(
                [taps * self.out_channels for taps in parts], 1
            )
            graph = incidence.neurons[name].graph
            neurons[name] = new + from_network[name].index_select(0, graph)
            for (bundle, end), sent in zip(incident, messages, strict=True):
                if end == "target":
                    # Every edge has one target: what the network says goes along.
                    sent = sent + from_network[bundle.key].index_select(0, graph)
                to_edges[bundle.key, end] = sent
        weights = {}
        for bundle in spec.bundles:
            key = bundle.key
            weights[key] = edge_update(
                self._read(bundle, features),
                self.weights[module_name(key)],
                to_edges[key, "target"],
                to_edges[key, "source"],
                incidence.edges(bundle),
            )
        return self._output(features, weights, neurons, from_network[NETWORK])

    def _pointwise(self, features: WeightFeatures) -> WeightFeatures:
        spec = self.spec
        constant = self._split_summary(self.bias) if self.bias is not None else {}
        linear = torch.nn.functional.linear
        weights = {
            b.key: linear(
                self._read(b, features), self.weights[module_name(b.key)], constant.get(b.key)
            )
            for b in spec.bundles
        }
        neurons = {}
        for neuron in spec.neurons:
            x = features.neurons[neuron.name].flatten(1)
            if neuron.taps:
                x = linear(x, self.neurons[neuron.name], constant.get(neuron.name))
            neurons[neuron.name] = x
        own = features.network[NETWORK].flatten(1)
        network = linear(own, self.network, constant.get(NETWORK)) if spec.network_taps else own
        return self._output(features, weights, neurons, network)

    def _neuron_means(
        self, features: WeightFeatures
    ) -> tuple[dict[WeightKey, Tensor], dict[tuple[WeightKey, str], Tensor]]:
        """The row and column aggregates of every weight type."""
        sums, means = {}, {}
        for bundle in self.spec.bundles:
            x = features.weights[bundle.key].flatten(1)
            edges = features.incidence.edges(bundle)
            targets = features.incidence.neurons[bundle.target].count
            sources = features.incidence.neurons[bundle.source].count
            rows = segment_sum(x, edges.target, targets)
            columns = segment_sum(x, edges.source, sources)
            sums[bundle.key] = rows
            if self.reduce == "mean":
                rows = divide_by_count(rows, edges.per_target)
                columns = divide_by_count(columns, edges.per_source)
            means[bundle.key, "target"] = rows
            means[bundle.key, "source"] = columns
        return sums, means

    def _read(self, bundle: Bundle, features: WeightFeatures) -> Tensor:
        x = features.weights[bundle.key].flatten(1)
        if bundle.is_self and not self.pointwise:
            return with_transposed(x, features.incidence.edges(bundle))
        return x

    def _output(
        self,
        features: WeightFeatures,
        weights: dict[WeightKey, Tensor],
        neurons: dict[str, Tensor],
        network: Tensor,
    ) -> WeightFeatures:
        taps = self.spec.taps

        def tapped(key: Key, x: Tensor) -> Tensor:
            return x.reshape(x.shape[0], taps[key], self.out_channels)

        return features.replace(
            Levels(
                {key: tapped(key, x) for key, x in weights.items()},
                {key: tapped(key, x) for key, x in neurons.items()},
                {NETWORK: tapped(NETWORK, network)},
            )
        )

    def _split_summary(self, x: Tensor) -> dict[Key, Tensor]:
        """One part per type, along the last axis, in the order of the network summary."""
        taps = self.spec.taps
        parts = x.split([count * self.out_channels for count in taps.values()], -1)
        return dict(zip(taps, parts, strict=True))

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
