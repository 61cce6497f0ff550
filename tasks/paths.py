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

    A path leads from a neuron whose type nothing leads to, an input, to one whose type leads
    nowhere, an output. A weight on no path is never trained: either its input does not depend on
    the data, or nothing depends on its output.

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
    reached, leading = _reached(ahead, counts), _reached(back, counts)

    def cut(key: object, x: Tensor) -> Tensor:
        if not isinstance(key, tuple):
            return x
        _, first, last = ahead[key]
        is_on = reached[key[0]][first] & leading[key[2]][last]
        return x * is_on.to(x.dtype).view(-1, 1, 1)

    return kept.map_types(cut)


def _reached(edges: _Edges, counts: dict[str, int]) -> dict[str, Tensor]:
    """The neurons that kept edges lead to, beginning at the types that no weights end at."""
    ends = {target for _, _, target in edges}
    device = next(iter(edges.values()))[0].device
    reached = {
        name: torch.full((count,), name not in ends, device=device)
        for name, count in counts.items()
    }
    while True:
        before = sum(int(x.sum()) for x in reached.values())
        for (source, _, target), (is_kept, first, last) in edges.items():
            reached[target][last[is_kept & reached[source][first]]] = True
        if sum(int(x.sum()) for x in reached.values()) == before:
            return reached
