"""Which weights of a pruned network lie on a way from its inputs to its outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from nfn_graph import WeightFeatures
from nfn_graph.spec import WeightKey

# For every weight type, the edges that are kept with the rows of the neurons at their two ends.
_Edges = dict[WeightKey, tuple[Tensor, Tensor, Tensor]]


def on_paths(kept: WeightFeatures) -> WeightFeatures:
    """What is left of kept weights without those that no path goes through.

    A path leads from an input, whose type nothing leads to, to an output, whose type leads
    nowhere. Where inputs are added to, or outputs are read on, they are the types that keep their
    order. A weight on no path carries no data: its input is a constant, or nothing depends on its
    output.

    Args:
        kept: One channel before the fold, zero where a weight is pruned; of one network or many.

    Returns:
        The same with zeros for the weights on no path. Neurons keep what they have.
    """
    rows = kept.incidence
    ahead: _Edges = {
        key: (x.flatten(1).any(1), rows.weights[key].source, rows.weights[key].target)
        for key, x in kept.weights.items()
    }
    back: _Edges = {
        (target, name, source): (x, last, first)
        for (source, name, target), (x, first, last) in ahead.items()
    }
    counts = {name: neurons.count for name, neurons in rows.neurons.items()}
    fixed = {neuron.name for neuron in rows.spec.neurons if neuron.fixed}
    reached, leading = _reached(ahead, counts, fixed), _reached(back, counts, fixed)

    def cut(key: object, x: Tensor) -> Tensor:
        if not isinstance(key, tuple):
            return x
        _, first, last = ahead[key]
        is_on = reached[key[0]][first] & leading[key[2]][last]
        return x * is_on.to(x.dtype).view(-1, 1, 1)

    return kept.map_types(cut)


def _reached(edges: _Edges, counts: dict[str, int], fixed: set[str]) -> dict[str, Tensor]:
    """The neurons that kept edges lead to from the inputs; or to the outputs, if turned round."""
    sources, targets = {source for source, _, _ in edges}, {target for _, _, target in edges}
    starts = (sources - targets) or (sources & fixed)
    device = next(iter(edges.values()))[0].device
    reached = {
        name: torch.full((count,), name in starts, device=device) for name, count in counts.items()
    }
    while True:
        before = sum(int(x.sum()) for x in reached.values())
        for (source, _, target), (is_kept, first, last) in edges.items():
            reached[target][last[is_kept & reached[source][first]]] = True
        if sum(int(x.sum()) for x in reached.values()) == before:
            return reached
