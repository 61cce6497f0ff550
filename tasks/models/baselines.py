"""Baselines: models that read networks without the layers of this package.

- Statistics of weights, and an MLP on them. The features are those of `Predicting Neural Network
  Accuracy from Weights <https://arxiv.org/abs/2002.11448>`_ (Unterthiner et al.): the mean, the
  variance and the quantiles at 0, 1/4, 1/2, 3/4 and 1 of every weight and every bias tensor. They
  do not change when neurons are permuted.
- An MLP on the concatenated weights of a network, which depends on their order.
- Models of PyG on the networks as plain graphs: neurons are nodes, weights are edge features.
  They know the layers only by the type numbers of nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINEConv, PNAConv, TransformerConv, global_mean_pool

from nfn_graph import NetworkSpec, Probe, ProbeNet, Standardize, WeightFeatures, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.nn.models import mlp
from nfn_graph.spec import Key

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
NUM_STATISTICS = 2 + len(QUANTILES)
_HEADS = 4


class Statistics(nn.Module):
    """The statistics of every tensor, standardized over networks.

    Args:
        spec: The types of all networks.

    Attributes:
        num_features: The number of statistics of a network.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__()
        self.spec = spec
        self.num_features = NUM_STATISTICS * sum(taps > 0 for taps in spec.taps.values())
        self.register_buffer("mean", torch.zeros(self.num_features))
        self.register_buffer("std", torch.ones(self.num_features))

    @torch.no_grad()
    def fit(self, graphs: Iterable[WeightGraph]) -> Statistics:
        """Sets the mean and standard deviation of every statistic over networks."""
        found = [tensor_statistics(g.features(spec=self.spec)).double() for g in graphs]
        std, mean = torch.std_mean(torch.cat(found), 0, correction=0)
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std > 1e-6 * mean.abs(), std, 1.0))
        return self

    def forward(self, graph: WeightGraph) -> Tensor:
        """`[networks, num_features]`."""
        return (tensor_statistics(graph.features(spec=self.spec)) - self.mean) / self.std


class StatNN(nn.Module):
    """An MLP on the statistics of every tensor.

    Args:
        spec: The types of all networks.
        out_features: Outputs per network.
        head: Hidden sizes.
        dropout: The dropout probability between layers.
    """

    def __init__(
        self, spec: NetworkSpec, out_features: int, head: Sequence[int], dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.statistics = Statistics(spec)
        self.head = mlp([self.statistics.num_features, *head], out_features, dropout)

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of every network."""
        return self.head(self.statistics(graph))


class ProbeStatNN(ProbeNet):
    """An MLP on the outputs at probes, their entropies and the statistics of the weights.

    Args:
        probe: The inputs that the networks are run on.
        out_features: Outputs per network.
        head: Hidden sizes.
        dropout: The dropout probability between layers.
    """

    def __init__(
        self, probe: Probe, out_features: int, head: Sequence[int], dropout: float = 0.0
    ) -> None:
        statistics = Statistics(probe.spec)
        super().__init__(
            probe, out_features, head, dropout,
            entropy=True, extra_features=statistics.num_features,
        )  # fmt: skip
        self.statistics = statistics

    def features(self, graph: WeightGraph) -> Tensor:
        """Returns all of them concatenated, `[networks, features]`."""
        return torch.cat([super().features(graph), self.statistics(graph)], 1)


def tensor_statistics(features: WeightFeatures) -> Tensor:
    """`[networks, tensors * 7]`; zeros for a tensor that a network does not have."""
    parts = []
    for key, x in features.tensors():
        if not x.shape[1]:
            continue
        rows = features.graph_of(key).bincount(minlength=features.num_graphs)
        counts = rows * (x.numel() // max(1, len(x)))
        parts.append(_statistics(x.flatten(), counts))
    return torch.cat(parts, 1)


def _statistics(values: Tensor, counts: Tensor) -> Tensor:
    """The mean, variance and quantiles of values in consecutive groups, `[groups, 7]`."""
    groups = len(counts)
    group = torch.repeat_interleave(
        torch.arange(groups, device=values.device), counts, output_size=len(values)
    )
    some = counts.clamp(min=1).to(values.dtype)
    zeros = values.new_zeros(groups)
    mean = zeros.index_add(0, group, values) / some
    variance = zeros.index_add(0, group, (values - mean[group]).square()) / some
    # Sorted by value, then stably by group.
    by_value = values.argsort(stable=True)
    order = by_value[group[by_value].argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    place = torch.tensor(QUANTILES, dtype=torch.float64, device=values.device)
    place = place * (counts - 1).clamp(min=0).unsqueeze(1)
    low, share = place.floor().long(), place.frac().to(values.dtype)
    high = torch.minimum(low + 1, (counts - 1).clamp(min=0).unsqueeze(1))
    if not len(values):
        return values.new_zeros(groups, NUM_STATISTICS)
    first = values[order[(starts.unsqueeze(1) + low).clamp(max=len(values) - 1)]]
    second = values[order[(starts.unsqueeze(1) + high).clamp(max=len(values) - 1)]]
    quantiles = torch.lerp(first, second, share)
    found = torch.cat([torch.stack([mean, variance], 1), quantiles], 1)
    return torch.where(counts.unsqueeze(1) > 0, found, 0)


class FlatMLP(nn.Module):
    """An MLP on the standardized, flattened weights; smaller networks are padded with zeros.

    Args:
        spec: The types of all networks.
        sizes: The most neurons of each type that a network may have.
        out_features: Outputs per network.
        head: Hidden sizes.
        dropout: The dropout probability between layers.
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
    """The number of entries of a network with these numbers of neurons."""
    return sum(_rows(key, sizes) * taps for key, taps in spec.taps.items())


def _rows(key: Key, sizes: Mapping[str, int]) -> int:
    return sizes[key] if isinstance(key, str) else sizes[key[0]] * sizes[key[2]]


class PlainGraphModel(nn.Module):
    """Message passing along and against the edges of `to_homogeneous()`, a mean, an MLP.

    Args:
        kind: `"gine"`, `"pna"` or `"transformer"`.
        spec: The types of all networks.
        out_features: Outputs per network.
        channels: The channels of every layer; all use the first number, to add their input.
        head: Hidden sizes of the MLP.
        dropout: The dropout probability between layers.
    """

    def __init__(
        self,
        kind: str,
        spec: NetworkSpec,
        out_features: int,
        channels: Sequence[int],
        head: Sequence[int],
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.spec = spec
        width = max(_HEADS, channels[0] - channels[0] % _HEADS)
        self.standardize = Standardize(spec, 1)
        self.nodes = nn.Linear(max(n.taps for n in spec.neurons) or 1, width)
        self.node_types = nn.Embedding(len(spec.neurons), width)
        self.edges = nn.Linear(max(w.taps for w in spec.weights), width)
        # Edges against the direction of the network have types of their own.
        self.edge_types = nn.Embedding(2 * len(spec.weights), width)
        self.layers = nn.ModuleList(_layer(kind, width) for _ in channels)
        self.head = mlp([width * len(spec.neurons), *head], out_features, dropout)

    def forward(self, graph: WeightGraph) -> Tensor:
        """The outputs of every network."""
        standardized = self.standardize(graph.features(spec=self.spec)).to_graph()
        data = standardized.to_homogeneous(spec=self.spec)
        edge_index, edge_type = data.edge_index, data.edge_type
        both = torch.cat([edge_index, edge_index.flip(0)], 1)
        types = torch.cat([edge_type, edge_type + len(self.spec.weights)])
        edges = self.edges(data.edge_attr).repeat(2, 1) + self.edge_types(types)
        values = data.x if data.x.shape[1] else data.x.new_zeros(len(data.x), 1)
        x = self.nodes(values) + self.node_types(data.node_type)
        for layer in self.layers:
            x = x + layer(x.relu(), both, edges)
        kinds = len(self.spec.neurons)
        group = data.batch * kinds + data.node_type
        pooled = global_mean_pool(x, group, graph.features().num_graphs * kinds)
        return self.head(pooled.unflatten(0, (-1, kinds)).flatten(1))


def _layer(kind: str, width: int) -> nn.Module:
    # PyG's annotations call its own layers abstract.
    kinds: dict[str, Any] = {"gine": GINEConv, "transformer": TransformerConv, "pna": PNAConv}
    layer = kinds[kind]
    options: dict[str, Any] = {"edge_dim": width}
    if kind == "gine":
        network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        return layer(network, train_eps=True, aggr="mean", **options)
    if kind == "transformer":
        return layer(width, width // _HEADS, heads=_HEADS, **options)
    # Layers are fully connected, so degrees say little: the identity is the only scaler.
    return layer(
        width,
        width,
        aggregators=["mean", "min", "max", "std"],
        scalers=["identity"],
        deg=torch.tensor([0, 1]),
        **options,
    )
