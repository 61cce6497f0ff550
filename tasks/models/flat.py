"""An MLP on all weights of a network, one after the other, as if their order meant something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nfn_graph import NetworkSpec, Standardize, WeightFeatures, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.nn.models import mlp
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
        self.head = mlp([num_places(spec, sizes), *head], out_features, dropout)

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of every network."""
        return self.head(self.flatten(self.standardize(graph.features(spec=self.spec))))

    def flatten(self, features: WeightFeatures) -> Tensor:
        """All values of each network at fixed places: `[networks, places]`."""
        self._check_sizes(features)
        parts = []
        for key, x in features.tensors():
            graph, place = self._where(key, features)
            out = x.new_zeros(features.num_graphs, _rows(key, self.sizes), x.shape[1] * x.shape[2])
            out[graph, place] = x.flatten(1)
            parts.append(out.flatten(1))
        return torch.cat(parts, 1)

    def unflatten(self, flat: Tensor, features: WeightFeatures) -> WeightFeatures:
        """Features of the same networks, from values at the places of :meth:`flatten`."""
        tensors = dict(features.tensors())
        counts = [_rows(key, self.sizes) * x.shape[1] * x.shape[2] for key, x in tensors.items()]
        parts = dict(zip(tensors, flat.split(counts, 1), strict=True))

        def values(key: Key, x: Tensor) -> Tensor:
            graph, place = self._where(key, features)
            return parts[key].unflatten(1, (_rows(key, self.sizes), -1))[graph, place].view_as(x)

        return features.map_types(values)

    def _check_sizes(self, features: WeightFeatures) -> None:
        for name, position in features.incidence.positions.items():
            most = int(position.max()) + 1 if len(position) else 0
            if most > self.sizes.get(name, 0):
                raise UserError(
                    f"Expected networks with at most {self.sizes.get(name, 0)} neurons of type "
                    f"'{name}', for which this MLP was made (got {most})"
                )

    def _where(self, key: Key, features: WeightFeatures) -> tuple[Tensor, Tensor]:
        """The network and the place of every row of a type."""
        position = features.incidence.positions
        if isinstance(key, str):
            return features.graph_of(key).long(), position[key].long()
        edges = features.incidence.weights[key]
        target, source = position[key[2]][edges.target], position[key[0]][edges.source]
        place = target * self.sizes[key[0]] + source
        return features.graph_of(key[2])[edges.target].long(), place.long()


def num_places(spec: NetworkSpec, sizes: Mapping[str, int]) -> int:
    """How many numbers a network with so many neurons of each type has."""
    return sum(_rows(key, sizes) * taps for key, taps in spec.taps.items())


def _rows(key: Key, sizes: Mapping[str, int]) -> int:
    return sizes[key] if isinstance(key, str) else sizes[key[0]] * sizes[key[2]]
