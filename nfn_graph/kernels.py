"""Segment sums and their adjoint, on `torch.embedding_bag` over static pointers.

`embedding_bag` is the fastest segment sum of torch on the CPU: parallel, deterministic, and
as quick for strided as for contiguous segments. It has neither a double backward nor, here,
a need for one: the derivative of a sum is an expansion, and that of an expansion a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nfn_graph.rows import EdgeRows, Segments


def plain_segment_sum(x: Tensor, segments: Segments) -> Tensor:
    """Sums the rows of every segment: `[rows, width] -> [segments, width]`."""
    return x.new_zeros(segments.count, x.shape[1]).index_add(0, segments.index, x)


def plain_expand(x: Tensor, segments: Segments) -> Tensor:
    """Gives every row the value of its segment: `[segments, width] -> [rows, width]`."""
    return x.index_select(0, segments.index)


def bag_sum(x: Tensor, segments: Segments) -> Tensor:
    """:func:`plain_segment_sum` by `embedding_bag`, outside of autograd."""
    return bag_rows(x, segments.order, segments.pointers)


def bag_ends(table: Tensor, edges: EdgeRows) -> Tensor:
    """For every edge, the sum of its target's and its source's row of a table of both."""
    return bag_rows(table, edges.ends, edges.pairs)


def bag_rows(x: Tensor, rows: Tensor, pointers: Tensor) -> Tensor:
    """Sums rows `rows[pointers[i]:pointers[i + 1]]` of a tensor, for every `i`."""
    if not x.shape[1]:
        return x.new_zeros(pointers.shape[0] - 1, 0)
    # Of a tensor with gradients it would prepare its own backward as well.
    return torch.embedding_bag(x.detach(), rows, pointers, include_last_offset=True)[0]


class SegmentSum(torch.autograd.Function):
    """:func:`plain_segment_sum`, differentiable any number of times."""

    @staticmethod
    def forward(x: Tensor, segments: Segments) -> Tensor:
        """Sums."""
        return bag_sum(x, segments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Segments], output: Tensor) -> None:
        """Keeps the pointers only."""
        _, ctx.segments = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Expands."""
        return Expand.apply(grads[0], ctx.segments), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, segments: Segments) -> Any:
        """The plain operation, with the batch among the columns."""
        return _columns_batched(plain_segment_sum, in_dims[0], x, segments)


class Expand(torch.autograd.Function):
    """:func:`plain_expand`, differentiable any number of times."""

    @staticmethod
    def forward(x: Tensor, segments: Segments) -> Tensor:
        """Expands."""
        return plain_expand(x, segments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Segments], output: Tensor) -> None:
        """Keeps the pointers only."""
        _, ctx.segments = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sums."""
        return SegmentSum.apply(grads[0], ctx.segments), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, segments: Segments) -> Any:
        """The plain operation, with the batch among the columns."""
        return _columns_batched(plain_expand, in_dims[0], x, segments)


def _columns_batched(function: Any, dim: int, x: Tensor, segments: Segments) -> tuple[Tensor, int]:
    x = x.movedim(dim, 1)
    out = function(x.flatten(1), segments)
    return out.reshape(out.shape[0], *x.shape[1:]), 1
