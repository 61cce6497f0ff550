r"""Statistics of weights as features, and an MLP on them.

The features of `Predicting Neural Network Accuracy from Weights
<https://arxiv.org/abs/2002.11448>`_ (Unterthiner et al.): of every weight and every bias tensor
its mean, its variance and its quantiles at 0, 1/4, 1/2, 3/4 and 1. They do not change when
neurons are permuted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from nfn_graph import NetworkSpec, Probe, ProbeNet, WeightFeatures, WeightGraph
from nfn_graph.nn.models import mlp

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
NUM_STATISTICS = 2 + len(QUANTILES)


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
        dropout: Between them.
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
        dropout: Between them.
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
        """All of them side by side, `[networks, features]`."""
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
    """Of values in consecutive groups: mean, variance, quantiles; `[groups, 7]`."""
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
