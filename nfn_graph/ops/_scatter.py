"""The two scatter operations with the package torch-scatter."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from nfn_graph.features import Grouping
from nfn_graph.ops._kernels import plain_expand, plain_segment_sum


def segment_sum(x: Tensor, grouping: Grouping) -> Tensor:
    """Sums the rows of every group."""
    if not x.shape[1] or grouping.blocks:  # torch-scatter does not support tensors without columns.
        return plain_segment_sum(x, grouping)
    scatter = import_module("torch_scatter")
    if grouping.contiguous:
        return scatter.segment_csr(x, grouping.pointers.long(), reduce="sum")
    return scatter.scatter(x, grouping.index.long(), 0, dim_size=grouping.num_groups)


def expand(x: Tensor, grouping: Grouping) -> Tensor:
    """Gives every row the value of its group."""
    if not grouping.contiguous or not x.shape[1] or grouping.blocks:
        return plain_expand(x, grouping)
    return import_module("torch_scatter").gather_csr(x, grouping.pointers.long())
