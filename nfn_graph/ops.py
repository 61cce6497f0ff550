"""The scatters and gathers between the three levels.

All of them act on rows, `[count, width]`. The means over the edges of a target neuron are
the paper's row aggregates :math:`W_{j,*}`, those of a source neuron the column aggregates
:math:`W_{*,k}`, those of a network the layer aggregates :math:`W_{*,*}`.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from nfn_graph.incidence import EdgeRows

Reduce = Literal["mean", "sum", "max"]


def segment_sum(x: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums rows onto `count` rows: `out[index[i]] += x[i]`."""
    return x.new_zeros(count, x.shape[1]).index_add(0, index, x)


def segment_max(x: Tensor, index: Tensor, count: int) -> Tensor:
    """The largest of the rows with each index; 0 where there is none."""
    where = index.unsqueeze(1).expand_as(x)
    return x.new_zeros(count, x.shape[1]).scatter_reduce(0, where, x, "amax", include_self=False)


def divide_by_count(sums: Tensor, counts: Tensor) -> Tensor:
    """Turns sums into means; the mean over nothing is 0."""
    return sums / counts.clamp(min=1).to(sums.dtype).unsqueeze(1)


def edge_update(
    x: Tensor, weight: Tensor, to_target: Tensor, to_source: Tensor, edges: EdgeRows
) -> Tensor:
    """New edges: their own map, plus the messages of their two neurons."""
    y = x @ weight.t()
    y = y + to_target.index_select(0, edges.target)
    return y + to_source.index_select(0, edges.source)


def with_transposed(x: Tensor, edges: EdgeRows) -> Tensor:
    """For edges of a layer with itself: each row beside that of the transposed edge."""
    return torch.cat([x, x.index_select(0, edges.by_source)], 1)
