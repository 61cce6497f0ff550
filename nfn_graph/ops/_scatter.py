"""The two scatter operations by the package torch-scatter."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from nfn_graph.features import Segments
from nfn_graph.ops._kernels import plain_expand, plain_segment_sum


def segment_sum(x: Tensor, segments: Segments) -> Tensor:
    """Sums the rows of every segment."""
    if not x.shape[1] or segments.blocks:  # It does not know tensors without columns.
        return plain_segment_sum(x, segments)
    scatter = import_module("torch_scatter")
    if segments.contiguous:
        return scatter.segment_csr(x, segments.pointers.long(), reduce="sum")
    return scatter.scatter(x, segments.index.long(), 0, dim_size=segments.count)


def expand(x: Tensor, segments: Segments) -> Tensor:
    """Gives every row the value of its segment."""
    if not segments.contiguous or not x.shape[1] or segments.blocks:
        return plain_expand(x, segments)
    return import_module("torch_scatter").gather_csr(x, segments.pointers.long())
