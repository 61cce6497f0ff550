"""Weights whose scale does not depend on the width of the layer before."""

from __future__ import annotations

import math
from dataclasses import replace

from nfn_graph.data import Computation, Layout, View
from nfn_graph.messages import UserError
from nfn_graph.spec import WeightKey
from nfn_graph.transforms._reversible import ReversibleTransform, Stores


class ScaleByFanIn(ReversibleTransform):
    r"""Multiplies weights by their fan-in, so that networks of different widths look alike.

    .. math:: W'_{jk} = n_k^p \, W_{jk}

    where :math:`n_k` is the number of neurons that a neuron reads. Duplicating every hidden neuron
    and halving the outgoing weights does not change what a network computes. The outgoing weights
    are halved and their fan-in is doubled, so with `power=1` every weight keeps its original value,
    and layers that take means compute the same features. Weights from fixed neurons, whose number
    does not change, are not scaled.

    The inverse divides by the same factor, which is exact up to the last bit.
    :meth:`WeightGraph.run` still computes the function of the original network.

    Args:
        power: The exponent `p` of the fan-in. With 0.5, weights of the usual initialisations, whose
            standard deviation falls with the root of the width, get the same scale.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.transforms import ScaleByFanIn
        >>> graph = WeightGraph.from_tensors([torch.ones(4, 2), torch.ones(1, 4)])
        >>> scale = ScaleByFanIn()
        >>> scale(graph).to_tensors()["1.weight"]
        tensor([[4., 4., 4., 4.]])
        >>> scale.inverse(scale(graph)).to_tensors()["1.weight"]
        tensor([[1., 1., 1., 1.]])
    """

    def __init__(self, power: float = 1.0) -> None:
        is_number = isinstance(power, int | float) and not isinstance(power, bool)
        if not is_number or not math.isfinite(power) or abs(power) > 4:
            raise UserError(f"Expected an exponent of at most 4, such as 1 (got {power!r})")
        self.power = float(power)

    def __repr__(self) -> str:
        return f"ScaleByFanIn({self.power})"

    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        factors = self._factors(layout)
        for key, factor in factors.items():
            stores[key] = stores[key] * factor
        views: dict[int, list[View]] = {}
        computation = layout.computation
        for number, placements in enumerate(layout.sources):
            found = {factors.get(p.store, 1.0) for p in placements if isinstance(p.store, tuple)}
            if len(found) > 1:
                computation = Computation.unknown(
                    f"'{placements[0].keys[0]}' reads several layers, whose weights ScaleByFanIn "
                    f"multiplied by different numbers. Undo the transform first."
                )
            elif found - {1.0}:
                views[number] = [("truediv", (found.pop(),))]
        if computation.reason is None:
            computation = computation.reading(views)
        return replace(layout, computation=computation), stores

    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        for key, factor in self._factors(before).items():
            stores[key] = stores[key] / factor
        return stores

    def _factors(self, layout: Layout) -> dict[WeightKey, float]:
        """The factor of the weights of every type."""
        spec, found = layout.spec, {}
        for weight in spec.weights:
            targets = layout.num_rows(weight.target)
            if not spec.neuron[weight.source].fixed and targets:
                found[weight.key] = (layout.num_rows(weight.key) / targets) ** self.power
        return found
