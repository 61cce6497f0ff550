"""Zero biases for neurons without a bias."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nfn_graph.data import Layout, Placement, WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.spec import NetworkSpec, NeuronType, WeightKey
from nfn_graph.transforms._reversible import ReversibleTransform, Stores


class FillBiases(ReversibleTransform):
    """Gives every neuron with incoming weights a zero bias, if it has no taps yet.

    The new tensors are named after the incoming weight: `fc.bias` for `fc.weight`. The inverse
    removes them, and :meth:`WeightGraph.run` ignores them.

    Args:
        taps: The smallest number of biases of free neurons, or that of each neuron type by name. A
            neuron has one bias for every layer whose outputs are added there. Further zero biases,
            named `hidden1.bias2`, unify networks that add different numbers of layers.

    Example:
        >>> import torch
        >>> from nfn_graph import WeightGraph
        >>> from nfn_graph.transforms import FillBiases
        >>> graph = WeightGraph.from_tensors([torch.randn(4, 2), torch.randn(1, 4)])
        >>> fill = FillBiases()
        >>> fill(graph)["hidden1"].x.shape, fill.inverse(fill(graph))["hidden1"].x.shape
        (torch.Size([4, 1, 1]), torch.Size([4, 0, 1]))
    """

    def __init__(self, taps: int | Mapping[str, int] = 1) -> None:
        counts = list(taps.values()) if isinstance(taps, Mapping) else [taps]
        if any(not isinstance(count, int) or count < 1 for count in counts):
            raise UserError(f"Expected at least one bias (got {taps!r})")
        self.taps = taps

    def __repr__(self) -> str:
        return f"FillBiases({self.taps})"

    @classmethod
    def to_largest(cls, graphs: Iterable[WeightGraph]) -> FillBiases:
        """Fills every neuron type up to the largest number of taps that it has in these networks.

        If only some of the networks have a norm layer, the others get zeros for its parameters.
        """
        taps: dict[str, int] = {}
        for graph in graphs:
            for neuron in graph.spec.neurons:
                taps[neuron.name] = max(neuron.taps, taps.get(neuron.name, 0))
        return cls({name: count for name, count in taps.items() if count})

    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        spec = layout.spec
        leading = {w.target: w.key for w in reversed(spec.weights)}
        placements = list(layout.placements)
        neurons = []
        for neuron in spec.neurons:
            name = neuron.name
            taps = max(neuron.taps, self._least(neuron, name in leading))
            neurons.append(replace(neuron, taps=taps))
            if taps == neuron.taps:
                continue
            rows = stores[name]
            zeros = rows.new_zeros(rows.shape[0], taps - neuron.taps, rows.shape[2])
            stores[name] = torch.cat([rows, zeros], 1)
            placements += _new_biases(placements, neuron, taps, rows, leading.get(name))
        filled = NetworkSpec(tuple(neurons), spec.weights)
        return replace(layout, spec=filled, placements=tuple(placements)), stores

    def _least(self, neuron: NeuronType, is_target: bool) -> int:
        """The smallest number of taps that a neuron type must have."""
        if isinstance(self.taps, Mapping):
            return self.taps.get(neuron.name, 0)
        return 0 if not is_target else 1 if neuron.fixed else self.taps

    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        return {key: stores[key][:, :taps] for key, taps in before.spec.taps.items()}


def _new_biases(
    placements: Sequence[Placement],
    neuron: NeuronType,
    taps: int,
    rows: Tensor,
    leading: WeightKey | None,
) -> list[Placement]:
    """The placements of new biases; none in a graph that was not made from tensors."""
    weight = next((p for p in placements if p.store == leading), None)
    taken = {key for p in placements for key in p.keys}
    found = []
    for tap in range(neuron.taps, taps if placements else 0):
        key = f"{neuron.name}.bias{tap + 1}"
        if tap == 0 and weight is not None:
            own = weight.keys[0]
            key = f"{own.removesuffix('weight')}bias" if own.endswith("weight") else f"{own}.bias"
        if key in taken:
            raise UserError(f"Expected the name '{key}' to be free for a new bias (got a tensor)")
        empty = rows.new_empty(rows.shape[0])
        found.append(Placement.whole(key, empty, neuron.name, ("neuron",), tap))
    return found
