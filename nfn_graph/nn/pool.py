"""The invariant layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nfn_graph.features._features import WeightFeatures
from nfn_graph.features._fold import Levels
from nfn_graph.nn._checks import check_choice, check_features, check_folded
from nfn_graph.nn._summary import network_summary
from nfn_graph.nn.elementwise import Activation
from nfn_graph.ops._segments import Reduce
from nfn_graph.spec._sites import FoldedSpec


class Pool(nn.Module):
    r"""The invariant NF-Layer of `Permutation Equivariant Neural Functionals
    <https://arxiv.org/abs/2302.14040>`_ (section 2.3, appendix C.2): one aggregate per orbit
    of entries, for every channel.

    .. math::
        P(U) &= (W^{(1)}_{\star,\star}, \ldots, W^{(L)}_{\star,\star},
                 v^{(1)}_\star, \ldots, v^{(L)}_\star) \\
        \tilde P(U) &= (P(U), W^{(1)}_{\star,:}, W^{(L)}_{:,\star}, v^{(L)})

    The law is :math:`f(\sigma U) = f(U)`. On an NP fold the entries are those of :math:`P`,
    on an HNP fold those of :math:`\tilde P` without the entries that are aggregates of
    others; `full=True` keeps all of :math:`\tilde P`, in its order.

    Args:
        spec: The folded spec of the features.
        reduce: `"mean"`, `"sum"` or `"max"`. The aggregate over nothing is 0.
        full: Whether to keep the redundant entries of :math:`\tilde P`, which are
            :math:`2L + n_0 + 2 n_L` for a chain. With a single layer both axes of its weight
            are fixed, so all of its entries take the place of rows and columns.
        act: An activation of the input. The mean or sum of a ReLU keeps only the input for
            the gradient, where an activation before the pool keeps its own result too.

    Shapes:
        - input: features of `spec`.
        - output: `[graphs, num_entries, channels]`.
    """

    def __init__(
        self,
        spec: FoldedSpec,
        reduce: Reduce = "mean",
        full: bool = False,
        act: Activation | None = None,
    ) -> None:
        super().__init__()
        self.spec = check_folded(spec)
        self.reduce: Reduce = check_choice(reduce, ("mean", "sum", "max"))
        self.full = full
        self.act = act
        self._coarse = spec.network.fold("np") if full and spec.symmetry == "hnp" else None
        # Where the aggregates of tensors with a fixed axis are in the folded summary.
        self._kept = _fixed_entries(spec) if self._coarse else []
        self.num_entries = (
            self._coarse.summary_taps + len(self._kept) if self._coarse else spec.summary_taps
        )

    def forward(self, features: WeightFeatures) -> Tensor:
        """Pools every network of the batch."""
        check_features(features, self.spec)
        relu = self._sums_relu()
        if self.act is not None:
            weights = {} if relu else features.weights
            new = self.act(features.replace(Levels(weights, features.neurons, features.network)))
            weights = features.weights if relu else new.weights
            features = features.replace(Levels(weights, new.neurons, new.network))
        features = features.owned()
        entries = self._summary(features, self.spec, relu)
        if self._coarse is None:
            return entries
        coarse = self._summary(features.fold("np"), self._coarse)
        return torch.cat([coarse, entries[:, self._kept]], 1)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"{self.num_entries} entries, {self.reduce}, {self.spec.symmetry}"

    def _sums_relu(self) -> bool:
        """Whether the sums over the edges take the ReLU themselves."""
        relu = self.act is not None and isinstance(self.act.function, nn.ReLU)
        return relu and self.reduce != "max" and not self.full

    def _summary(self, features: WeightFeatures, spec: FoldedSpec, relu: bool = False) -> Tensor:
        flat = network_summary(features, spec, self.reduce, relu=relu)
        return flat.reshape(features.num_graphs, spec.summary_taps, features.channels)


def _fixed_entries(spec: FoldedSpec) -> list[int]:
    """Positions in the summary of tensors with a fixed axis: weights in order, then biases."""
    places: dict[object, range] = {}
    start = sum(bundle.taps for bundle in spec.bundles)
    for piece in [p for neuron in spec.neurons for p in neuron.pieces] + list(spec.pieces):
        if piece.axis not in ("own", "diagonal"):
            places[piece.store] = range(start, start + piece.taps)
        start += piece.taps
    order = [*spec.network.weight, *spec.network.neuron]
    return [i for store in order if store in places for i in places[store]]
