"""The floor: the matrix products of a layer, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nfn_graph import NFLinear, WeightFeatures
from nfn_graph.spec import module_name


def products(layer: NFLinear, features: WeightFeatures, backward: bool) -> Callable[[], object]:
    """Input times matrix for every type of every level; backward, the two more of each."""
    matrices: list[tuple[int, Tensor]] = [
        (features.weights[b.key].shape[0], layer.weights[module_name(b.key)].detach())
        for b in layer.spec.bundles
    ]
    matrices += [
        (features.neurons[n.name].shape[0], layer.neurons[n.name].detach())
        for n in layer.spec.neurons
        if n.name in layer.neurons
    ]
    matrices.append((features.num_graphs, layer.network.detach()))
    inputs = [
        (torch.randn(count, m.shape[1]).to(m), torch.randn(count, m.shape[0]).to(m), m)
        for count, m in matrices
    ]

    def run() -> list[Tensor]:
        kept = [x @ matrix.t() for x, _, matrix in inputs]
        if backward:
            for x, grad, matrix in inputs:
                kept += [grad @ matrix, grad.t() @ x]
        return kept

    return run
