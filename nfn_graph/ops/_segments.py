"""The scatters and gathers between the three levels.

All of them act on rows, `[count, width]`. The means over the edges of a target neuron are
the paper's row aggregates :math:`W_{j,*}`, those of a source neuron the column aggregates
:math:`W_{*,k}`, those of a network the layer aggregates :math:`W_{*,*}`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Literal

import torch
from torch import Tensor

from nfn_graph.features._rows import EdgeRows, Segments
from nfn_graph.ops._backends import current_backend
from nfn_graph.ops._kernels import Expand, SegmentSum, plain_expand, plain_segment_sum
from nfn_graph.ops._precision import sum_dtype

Reduce = Literal["mean", "sum", "max"]


def segment_sum(x: Tensor, segments: Segments, relu: bool = False) -> Tensor:
    """Sums the rows of every segment, or their ReLU: `[rows, width] -> [segments, width]`."""
    backend = current_backend()
    if backend == "torch":
        return SegmentSum.apply(x, segments, x if relu else None)
    x = x.relu() if relu else x
    # torch-scatter does not know tensors without columns.
    if backend == "plain" or not x.shape[1]:
        return plain_segment_sum(x, segments)
    scatter = import_module("torch_scatter")
    if segments.contiguous:
        return scatter.segment_csr(x, segments.pointers.long(), reduce="sum")
    return scatter.scatter(x, segments.index.long(), 0, dim_size=segments.count)


def expand(x: Tensor, segments: Segments) -> Tensor:
    """Gives every row the value of its segment: `[segments, width] -> [rows, width]`."""
    backend = current_backend()
    if backend == "torch":
        return Expand.apply(x, segments, None)
    if backend == "plain" or not segments.contiguous or not x.shape[1]:
        return plain_expand(x, segments)
    return import_module("torch_scatter").gather_csr(x, segments.pointers.long())


def segment_max(x: Tensor, index: Tensor, count: int) -> Tensor:
    """The largest of the rows with each index, value by value; 0 where there is none."""
    where = index.unsqueeze(1).expand_as(x)
    return x.new_zeros(count, x.shape[1]).scatter_reduce(0, where, x, "amax", include_self=False)


def divide_by_count(sums: Tensor, counts: Tensor) -> Tensor:
    """Turns sums into means; the mean over nothing is 0."""
    wide = sum_dtype(sums.dtype)
    return (sums.to(wide) / counts.clamp(min=1).to(wide).unsqueeze(1)).to(sums.dtype)


def with_transposed(x: Tensor, edges: EdgeRows) -> Tensor:
    """For edges of a layer with itself: each row beside that of the transposed edge."""
    return torch.cat([x, x.index_select(0, edges.transposed)], 1)
