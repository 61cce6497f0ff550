"""The invariant layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nfn_graph.features import Grouping, WeightFeatures
from nfn_graph.nn._layer_checks import check_aggregate, check_features, check_folded
from nfn_graph.nn.elementwise import Activation
from nfn_graph.ops import Reduce, divide_by_count, segment_max, segment_sum
from nfn_graph.ops._precision import sum_dtype
from nfn_graph.spec import FoldedSpec, Key


class Pool(nn.Module):
    r"""The invariant NF-Layer of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (section 2.3, appendix C.2): one aggregate per orbit
    of entries, for every channel.

    .. math::
        P(U) &= (W^{(1)}_{\star,\star}, \ldots, W^{(L)}_{\star,\star},
                 v^{(1)}_\star, \ldots, v^{(L)}_\star) \\
        \tilde P(U) &= (P(U), W^{(1)}_{\star,:}, W^{(L)}_{:,\star}, v^{(L)})

    The law is :math:`f(\sigma U) = f(U)`. On an NP fold, the entries are those of :math:`P`. On an
    HNP fold, they are those of :math:`\tilde P` without the entries that are aggregates of others;
    `full=True` keeps all entries of :math:`\tilde P`, in its order.

    Args:
        spec: The folded spec of the features.
        aggr: `"mean"`, `"sum"` or `"max"`. The aggregate over nothing is 0.
        full: Whether to keep the redundant entries of :math:`\tilde P` on an HNP fold; an NP fold
            has none. For a chain, :math:`\tilde P` has :math:`2L + n_0 + 2 n_L` entries in total.
            With a single layer both axes of its weight are fixed, so all of its entries take the
            place of rows and columns.
        act: An activation of the input. The mean or sum of a ReLU keeps only the input for the
            gradient, whereas an activation before the pool also keeps its own result.

    Shapes:
        - input: features of `spec`.
        - output: `[graphs, num_entries, channels]`.

    Example:
        >>> from nfn_graph import NetworkSpec, Pool
        >>> from nfn_graph.testing import random_graph
        >>> spec = NetworkSpec.chain(2, input_size=2, output_size=1)
        >>> graph = random_graph(spec, {"hidden1": 4})
        >>> Pool(spec.fold("np"))(graph.features("np")).shape  # two weight types, two bias types
        torch.Size([1, 4, 1])
    """

    def __init__(
        self,
        spec: FoldedSpec,
        aggr: Reduce = "mean",
        full: bool = False,
        act: Activation | None = None,
    ) -> None:
        super().__init__()
        self.spec = check_folded(spec)
        self.aggr: Reduce = check_aggregate(aggr, ("mean", "sum", "max"))
        self.full = full
        self.act = act
        self._coarse = spec.unfolded.fold("np") if full and spec.symmetry == "hnp" else None
        # Where the aggregates of tensors with a fixed axis are in the folded summary.
        self._kept = _fixed_entries(spec) if self._coarse else []
        self.num_entries = (
            self._coarse.summary_taps + len(self._kept) if self._coarse else spec.summary_taps
        )

    def forward(self, features: WeightFeatures) -> Tensor:
        """Pools every network of the batch."""
        check_features(features, self.spec)
        relu = self._sums_relu()
        features = self._activated(features, relu).zero_unfilled()
        entries = self._summary(features, self.spec, relu)
        if self._coarse is None:
            return entries
        coarse = self._summary(features.fold("np"), self._coarse)
        return torch.cat([coarse, entries[:, self._kept]], 1)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.num_entries} entries, {self.aggr}, {self.spec.symmetry}"

    def _sums_relu(self) -> bool:
        """Whether the sums over the weights apply the ReLU themselves."""
        relu = self.act is not None and isinstance(self.act.function, nn.ReLU)
        return relu and self.aggr != "max" and not self.full

    def _activated(self, features: WeightFeatures, relu: bool) -> WeightFeatures:
        """Applies the activation, except to weights whose sums apply the ReLU themselves."""
        if self.act is None:
            return features
        left = {k: x for k, x in features.tensors() if relu and not isinstance(k, str)}
        others = features.replace({k: x.narrow(0, 0, 0) for k, x in left.items()})
        return self.act(others).replace(left)

    def _summary(self, features: WeightFeatures, spec: FoldedSpec, relu: bool = False) -> Tensor:
        flat = network_summary(features, spec, self.aggr, relu=relu)
        return flat.reshape(features.num_graphs, spec.summary_taps, features.channels)


def network_summary(
    features: WeightFeatures,
    spec: FoldedSpec,
    reduce: Reduce,
    totals: dict[Key, Tensor] | None = None,
    relu: bool = False,
) -> Tensor:
    """One aggregate for every tap of every type, `[graphs, summary taps * channels]`.

    This is the summary that the map of the network reads in the NF-Layer.

    Args:
        features: Features of that spec.
        spec: The folded spec, which determines the order of the entries.
        reduce: The aggregate.
        totals: The sums (or maxima) of some kinds of entries, if they are known.
        relu: Whether to apply a ReLU to the weights first, for a mean or a sum.
    """
    rows = features.incidence.sites[spec.symmetry]
    network, found = spec.sites[-1], []
    for part, count in zip(network.parts, rows[-1].counts, strict=True):
        if totals is not None and part.key in totals:
            total = totals[part.key]
        else:
            x = features[part.key].flatten(1)
            path = [rows[number].groupings[cover] for number, cover in reversed(spec.path(part))]
            gated = relu and not isinstance(part.key, str)
            total = _aggregate(x, path, reduce, gated)
        if reduce == "mean" and count is not None:
            total = divide_by_count(total, count)
        found.append(total)
    return torch.cat(found, 1).to(features.dtype)


def _aggregate(x: Tensor, path: list[Grouping], reduce: Reduce, relu: bool) -> Tensor:
    if reduce == "max":
        return _largest(x, path)
    x = x.to(sum_dtype(x.dtype))
    # Summing through coarser and coarser sites gives many short sums, which run in parallel.
    for grouping in path:
        x, relu = segment_sum(x, grouping, relu), False
    return x


def _largest(x: Tensor, path: list[Grouping]) -> Tensor:
    if not path:
        return x
    index = path[0].index
    for grouping in path[1:]:
        index = grouping.index.index_select(0, index)
    return segment_max(x, index, path[-1].num_groups)


def _fixed_entries(spec: FoldedSpec) -> list[int]:
    """Positions in the summary of tensors with a fixed axis: weights in order, then biases."""
    network = spec.unfolded
    places: dict[Key, range] = {}
    for part in spec.sites[-1].parts:
        start = part.start
        for piece in spec.site[part.key].pieces:
            if len(spec.free(network.indices(piece.store))) < len(network.indices(piece.store)):
                places[piece.store] = range(start, start + piece.taps)
            start += piece.taps
    order: list[Key] = [*network.weight, *network.neuron]
    return [i for key in order if key in places for i in places[key]]
