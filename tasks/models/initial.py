"""Where the training of models made of NF-Layers begins."""

from __future__ import annotations

import math

import torch
from torch import nn

from nfn_graph import NFLinear


@torch.no_grad()
def begin_with_own_entries(model: nn.Module) -> None:
    r"""Draws the map from every weight to itself as a pointwise layer would: within
    :math:`\pm 1/\sqrt{n}` for its own `n` inputs alone.

    An NF-Layer counts all maps that add into an output as one fan-in. Of some sixteen taps the
    weight itself is one, and the others are means over many weights, which hardly differ from
    weight to weight: after a few layers little of the weight is left in its own features.
    Models that return weights, or tell INRs apart, then spend their first epochs on a plateau.
    """
    for layer in model.modules():
        if isinstance(layer, NFLinear):
            for matrix in layer.weights.values():
                bound = 1 / math.sqrt(max(1, matrix.shape[1]))
                nn.init.uniform_(matrix, -bound, bound)
