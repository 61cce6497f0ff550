"""The lower bound: only the matrix products of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nfn_graph import NFLinear, WeightFeatures


def products(layer: NFLinear, features: WeightFeatures, backward: bool) -> Callable[[], object]:
    """Multiplies the input by the matrix of every site; backward, two more products each."""
    rows = features.incidence.sites[layer.spec.symmetry]
    matrices: list[tuple[int, Tensor]] = [
        (site_rows.num_rows, matrix.detach())
        for site_rows, matrix in zip(rows, layer.site_maps(), strict=True)
        if matrix is not None
    ]
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
