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
        self.num_entries = (self._coarse or spec).summary_taps + len(self._kept)

    def forward(self, features: WeightFeatures) -> Tensor:
        """Pools every network of the batch."""
        check_features(features, self.spec)
        # Sums over the weights apply a ReLU themselves.
        relu = self.act is not None and isinstance(self.act.function, nn.ReLU)
        relu = relu and self.aggr != "max" and not self.full
        if self.act is not None:
            left = {k: x for k, x in features.tensors() if relu and not isinstance(k, str)}
            others = features.replace({k: x.narrow(0, 0, 0) for k, x in left.items()})
            features = self.act(others).replace(left)
        features = features.zero_unfilled()
        shape = features.num_graphs, -1, features.channels
        entries = network_summary(features, self.spec, self.aggr, relu=relu).reshape(shape)
        if self._coarse is None:
            return entries
        coarse = network_summary(features.fold("np"), self._coarse, self.aggr).reshape(shape)
        return torch.cat([coarse, entries[:, self._kept]], 1)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.num_entries} entries, {self.aggr}, {self.spec.symmetry}"


def network_summary(
    features: WeightFeatures,
    spec: FoldedSpec,
    reduce: Reduce,
    totals: dict[Key, Tensor] | None = None,
    relu: bool = False,
) -> Tensor:
    """One aggregate for every tap of every type, `[graphs, summary taps * channels]`.

    This is the summary that the map of the network reads in the NF-Layer. Sums or maxima that are
    already known are passed as `totals`. With `relu`, a mean or a sum first applies a ReLU to the
    weights.
    """
    rows = features.incidence.sites[spec.symmetry]
    network, found = spec.sites[-1], []
    for part, count in zip(network.parts, rows[-1].counts, strict=True):
        path = [rows[number].groupings[cover] for number, cover in reversed(spec.path(part))]
        if totals is not None and part.key in totals:
            total = totals[part.key]
        elif reduce == "max":
            total = _largest(features[part.key].flatten(1), path)
        else:
            total = features[part.key].flatten(1).to(sum_dtype(features.dtype))
            gated = relu and not isinstance(part.key, str)
            # Summing through coarser and coarser sites gives many short sums, which run in
            # parallel. The first of them applies the ReLU.
            for i, grouping in enumerate(path):
                total = segment_sum(total, grouping, gated and i == 0)
        if reduce == "mean" and count is not None:
            total = divide_by_count(total, count)
        found.append(total)
    return torch.cat(found, 1).to(features.dtype)


def _largest(x: Tensor, path: list[Grouping]) -> Tensor:
    """The maximum over all rows of a network, whose groupings lead to it from site to site."""
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
    return [i for key in network.taps for i in places.get(key, ())]
