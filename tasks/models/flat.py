"""An MLP on all weights of a network, one after the other, as if their order meant something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nfn_graph import NetworkSpec, Standardize, WeightFeatures, WeightGraph
from nfn_graph.nn.nfn import mlp
from nfn_graph.spec import Key


class FlatMLP(nn.Module):
    """An MLP on the standardized, flattened weights; smaller networks are padded with zeros.

    Args:
        spec: The types of all networks.
        sizes: The most neurons of each type that a network may have.
        out_features: Outputs per network.
        head: Hidden sizes.
        dropout: Between them.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        sizes: Mapping[str, int],
        out_features: int,
        head: Sequence[int],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.sizes = dict(sizes)
        self.standardize = Standardize(spec, 1)
        width = sum(self._places(key) * taps for key, taps in spec.taps.items())
        self.head = mlp([width, *head], out_features, dropout)

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of every network."""
        return self.head(self.flatten(self.standardize(graph.features(spec=self.spec))))

    def flatten(self, features: WeightFeatures) -> Tensor:
        """All values of each network at fixed places: `[networks, places]`."""
        incidence, parts = features.incidence, []
        for name, rows in incidence.neurons.items():
            most = int(rows.position.max()) + 1 if rows.count else 0
            if most > self.sizes.get(name, 0):
                raise ValueError(
                    f"Expected networks with at most {self.sizes.get(name, 0)} neurons of type "
                    f"'{name}', for which this MLP was made (got {most})"
                )
        for key, x in features.tensors():
            if isinstance(key, str):
                neurons = incidence.neurons[key]
                graph, place = neurons.graph, neurons.position
            else:
                edges = incidence.weights[key]
                source, target = incidence.neurons[key[0]], incidence.neurons[key[2]]
                graph = target.graph[edges.target]
                place = target.position[edges.target] * self.sizes[key[0]]
                place = place + source.position[edges.source]
            out = x.new_zeros(features.num_graphs, self._places(key), x.shape[1] * x.shape[2])
            out[graph.long(), place.long()] = x.flatten(1)
            parts.append(out.flatten(1))
        return torch.cat(parts, 1)

    def _places(self, key: Key) -> int:
        if isinstance(key, str):
            return self.sizes[key]
        return self.sizes[key[0]] * self.sizes[key[2]]
