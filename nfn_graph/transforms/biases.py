"""Biases where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from nfn_graph.data import Layout, Placement
from nfn_graph.spec import NetworkSpec, NeuronType, WeightKey
from nfn_graph.transforms.base import ReversibleTransform, Stores


class FillBiases(ReversibleTransform):
    """Gives every neuron that weights lead to a bias of zero, where it has no taps yet.

    The new tensors are named after the weight that leads there: `fc.bias` for `fc.weight`.
    The inverse drops them again, and :meth:`WeightGraph.run` leaves them out.

    Args:
        taps: How many biases free neurons must have at least. Where additions tie layers, a
            neuron has one for each of them; further ones of zero, named `hidden1.bias2`, bring
            networks with other ties together.
    """

    def __init__(self, taps: int = 1) -> None:
        if not isinstance(taps, int) or taps < 1:
            raise ValueError(f"Expected at least one bias (got {taps!r})")
        self.taps = taps

    def __repr__(self) -> str:
        return f"FillBiases({self.taps})"

    def _forward(self, layout: Layout, stores: Stores) -> tuple[Layout, Stores]:
        spec = layout.spec
        leading = {w.target: w.key for w in reversed(spec.weights)}
        placements = list(layout.placements)
        neurons = []
        for neuron in spec.neurons:
            name = neuron.name
            least = 1 if neuron.fixed else self.taps
            taps = max(neuron.taps, least if name in leading else 0)
            neurons.append(replace(neuron, taps=taps))
            if taps == neuron.taps:
                continue
            rows = stores[name]
            zeros = rows.new_zeros(rows.shape[0], taps - neuron.taps, rows.shape[2])
            stores[name] = torch.cat([rows, zeros], 1)
            placements += _new_biases(placements, neuron, taps, rows, leading.get(name))
        filled = NetworkSpec(tuple(neurons), spec.weights)
        return replace(layout, spec=filled, placements=tuple(placements)), stores

    def _inverse(self, layout: Layout, before: Layout, stores: Stores) -> Stores:
        return {key: stores[key][:, :taps] for key, taps in before.spec.taps.items()}


def _new_biases(
    placements: Sequence[Placement],
    neuron: NeuronType,
    taps: int,
    rows: Tensor,
    leading: WeightKey | None,
) -> list[Placement]:
    """The tensors of new taps; none in a graph that was not made from tensors."""
    weight = next((p for p in placements if p.store == leading), None)
    taken = {key for p in placements for key in p.keys}
    found = []
    for tap in range(neuron.taps, taps if placements else 0):
        key = f"{neuron.name}.bias{tap + 1}"
        if tap == 0 and weight is not None:
            key = _bias_key(weight.keys[0])
        if key in taken:
            raise ValueError(f"Expected the name '{key}' to be free for a new bias (got a tensor)")
        empty = rows.new_empty(rows.shape[0])
        found.append(Placement.whole(key, empty, neuron.name, ("neuron",), tap))
    return found


def _bias_key(weight_key: str) -> str:
    if weight_key.endswith("weight"):
        return weight_key.removesuffix("weight") + "bias"
    return weight_key + ".bias"
