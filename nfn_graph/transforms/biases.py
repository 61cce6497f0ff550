"""Biases where there are none."""

from __future__ import annotations

from dataclasses import replace

from nfn_graph.layout import Layout, Placement
from nfn_graph.spec import NetworkSpec
from nfn_graph.transforms.base import ReversibleTransform, Stores


class FillBiases(ReversibleTransform):
    """Gives every neuron that weights lead to a bias of zero, where it has no taps yet.

    The new tensors are named after the weight that leads there: `fc.bias` for `fc.weight`.
    The inverse drops them again.
    """

    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        spec = layout.spec
        leading = {w.target: w.key for w in reversed(spec.weights)}
        bare = [n.name for n in spec.neurons if n.taps == 0 and n.name in leading]
        placements = list(layout.placements)
        for name in bare:
            rows = stores[name]
            stores[name] = rows.new_zeros(rows.shape[0], 1, rows.shape[2])
            weight = next((p for p in layout.placements if p.store == leading[name]), None)
            if weight is not None:
                key = _bias_key(weight.keys[0], {k for p in placements for k in p.keys})
                placements.append(
                    Placement.whole(key, rows.new_empty(rows.shape[0]), name, ("neuron",))
                )
        neurons = tuple(replace(n, taps=1) if n.name in bare else n for n in spec.neurons)
        filled = NetworkSpec(neurons, spec.weights)
        return replace(layout, spec=filled, placements=tuple(placements)), stores

    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        return {key: stores[key][:, :taps] for key, taps in before.spec.taps.items()}


def _bias_key(weight_key: str, taken: set[str]) -> str:
    key = (
        weight_key.removesuffix("weight") + "bias"
        if weight_key.endswith("weight")
        else weight_key + ".bias"
    )
    if key in taken:
        raise ValueError(f"Expected the name '{key}' to be free for a new bias (got a tensor)")
    return key
