r"""One form for all sine networks that differ by the symmetries of the sine.

.. math:: \sin(-x) = -\sin(x), \qquad \sin(x + \pi) = -\sin(x)

A hidden neuron :math:`\sin(\omega_0 (w x + b))` can therefore be flipped (`w`, `b` and its
outgoing weights negated) and shifted (:math:`\pi / \omega_0` added to `b`, its outgoing weights
negated) without changing what the network computes. Together they bring every phase
:math:`\omega_0 b` into :math:`[0, \pi/2]`, where it stays unique but at the ends. This is a
symmetry that layers equivariant to permutations cannot see.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch_geometric.transforms import BaseTransform

from nfn_graph import WeightGraph
from nfn_graph.messages import UserError
from nfn_graph.spec import NetworkSpec, WeightKey


class CanonicalPhases(BaseTransform):
    """Brings the phase of every hidden sine neuron into [0, pi/2]; the function stays.

    Works on single graphs and on batches, whatever the widths and depths.

    Args:
        w0: The frequency factor of all hidden layers; or a tensor with that of every network.
    """

    def __init__(self, w0: float | Tensor = 30.0) -> None:
        if not (w0 > 0 if isinstance(w0, float | int) else bool((w0 > 0).all())):
            raise UserError(f"Expected w0 above 0 (got {w0})")
        self.w0 = w0

    def forward(self, data: WeightGraph) -> WeightGraph:
        """The same networks in their canonical form; `data` is not changed."""
        if not isinstance(data, WeightGraph):
            raise TypeError(f"Expected a WeightGraph (got {type(data).__name__})")
        raw = data.features()
        weights, neurons = dict(raw.weights), dict(raw.neurons)
        for name in hidden_chain(data.spec):
            biases = neurons[name]
            w0 = self.w0
            if isinstance(w0, Tensor):
                w0 = w0.to(biases)[raw.graph_of(name).long()].view(-1, 1, 1)
            new, flip, negate = canonical_phases(biases * w0)
            neurons[name] = new / w0
            for key, x in weights.items():
                edges = raw.incidence.weights[key]
                if key[2] == name:
                    weights[key] = x * flip[edges.target]
                elif key[0] == name:
                    weights[key] = x * negate[edges.source]
        return data.with_features({**weights, **neurons})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(w0={self.w0})"


def canonical_phases(phases: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Phases within [0, pi/2] for the same sines.

    Returns:
        The new phases; the signs of the incoming weights; the signs of the outgoing weights.
    """
    phases = torch.remainder(phases, 2 * math.pi)
    # sin(x + p) = -sin(x + (p - pi)) for p in [pi, 2 pi)
    shifted = phases >= math.pi
    phases = torch.where(shifted, phases - math.pi, phases)
    # sin(x + p) = sin(-x + (pi - p)) for p in (pi/2, pi)
    mirrored = phases > math.pi / 2
    phases = torch.where(mirrored, math.pi - phases, phases)
    one = torch.ones_like(phases)
    return phases.clamp(0, math.pi / 2), one.where(~mirrored, -1), one.where(~shifted, -1)


def hidden_chain(spec: NetworkSpec) -> list[str]:
    """The hidden neuron types of a network with one bias per neuron, first layer first."""
    into: dict[str, list[WeightKey]] = {n.name: [] for n in spec.neurons}
    out: dict[str, list[WeightKey]] = {n.name: [] for n in spec.neurons}
    for weight in spec.weights:
        into[weight.target].append(weight.key)
        out[weight.source].append(weight.key)
    hidden = [n for n in spec.neurons if into[n.name] and out[n.name]]
    for neuron in hidden:
        if neuron.taps != 1 or neuron.role or neuron.fixed:
            raise UserError(
                f"Expected hidden layers with a bias and nothing else, each of its own type "
                f"(got neuron type '{neuron}'). Canonical forms come before RoleTypes."
            )
    return [n.name for n in hidden]
