"""Segment sums and their adjoint, on `torch.embedding_bag` over static pointers.

`embedding_bag` is the fastest segment sum of torch on the CPU: parallel, deterministic, and
as fast for strided groups as for contiguous ones. It has no double backward, and needs none here:
the derivative of a sum is an expansion, and that of an expansion is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nfn_graph.features import Grouping, LargeBlock, Rows
from nfn_graph.ops._backends import is_transformed
from nfn_graph.ops._matmul import add_product
from nfn_graph.ops._precision import cast

# If a site has large blocks, the number of values that each thread takes through all steps before
# the next ones: small enough for the cache, and large enough to be worth the calls. There is a
# lower limit on rows, since every product first copies its matrix into another order.
_CACHED, _FEWEST_ROWS = 2**19, 2**12
# The number of values that a row should have for a fast broadcast.
_LONG_ROW = 2**9


def plain_segment_sum(x: Tensor, grouping: Grouping) -> Tensor:
    """Sums the rows of every group: `[rows, width] -> [groups, width]`."""
    sums = x.new_zeros(grouping.num_groups, x.shape[1])
    sums = sums.index_add(0, grouping.groups, grouping.listed(x))
    for block in grouping.blocks:
        start = block.coarse_start
        rows = torch.arange(start, start + block.num_coarse_rows, device=x.device)
        sums = sums.index_add(0, rows, block.sums(x))
    return sums


def plain_expand(x: Tensor, grouping: Grouping) -> Tensor:
    """Gives every row the value of its group: `[groups, width] -> [rows, width]`."""
    listed = x.index_select(0, grouping.groups)
    if not grouping.blocks:
        return listed
    return grouping.joined(listed, [block.expand(x) for block in grouping.blocks])


def bag_sum(x: Tensor, grouping: Grouping) -> Tensor:
    """Computes :func:`plain_segment_sum` with `embedding_bag`, outside of autograd."""
    sums = _bag_listed(x, grouping.bags)
    for block in grouping.blocks:
        sums.narrow(0, block.coarse_start, block.num_coarse_rows).add_(block.sums(x))
    return sums


def expand_rows(x: Tensor, grouping: Grouping) -> Tensor:
    """Computes :func:`plain_expand` in one piece of memory, outside of autograd."""
    if not grouping.blocks:
        return x.index_select(0, grouping.groups)
    out, listed = x.new_empty(grouping.num_rows, x.shape[1]), 0
    for start, count in grouping.gaps:
        groups = grouping.groups.narrow(0, listed, count)
        torch.index_select(x, 0, groups, out=out.narrow(0, start, count))
        listed += count
    for block in grouping.blocks:
        _broadcast([block], x, block.view(out))
    return out


def bag_up(x: Tensor, rows: Rows, dtype: torch.dtype) -> Tensor:
    """Sums the rows for every cover; the results of the covers follow each other."""
    blocks = rows.blocks
    if not blocks:
        return _bag_listed(cast(x, dtype), rows.bags)
    if rows.groupings[0].gaps:
        table = _bag_listed(cast(x, dtype), rows.bags)
    else:
        table = x.new_zeros(sum(rows.cover_sizes), x.shape[1], dtype=dtype)
    for at_covers in blocks:
        # Every stretch is read from memory once and summed for all covers while it is cached.
        for stretch in _stretches(at_covers, x):
            for block in stretch:
                part = table.narrow(0, block.coarse_start, block.num_coarse_rows)
                part.add_(block.sums(x, dtype))
    return table


def bag_down(
    table: Tensor, rows: Rows, x: Tensor | None = None, matrix: Tensor | None = None
) -> Tensor:
    """Sums, for every row, its rows in a table of all covers: the adjoint of :func:`bag_up`.

    Args:
        table: The rows of all covers, one cover after another.
        rows: The rows.
        x: Rows whose products with `matrix` are added to the sums, if given.
        matrix: The matrix that `x` is multiplied by.
    """
    if not rows.blocks:
        out = _listed_down(table, rows, 0, rows.num_rows)
        del table  # Frees the messages of the covers before the product needs memory.
        return out if x is None or matrix is None else add_product(out, x, matrix)
    out = table.new_empty(rows.num_rows, table.shape[1])

    def add(part: Tensor, start: int) -> None:
        if x is not None and matrix is not None:
            add_product(part, x.narrow(0, start, len(part)), matrix)

    place, step = 0, _cached_rows(table)
    for begin, count in rows.groupings[0].gaps:
        for start in range(begin, begin + count, step):
            part = out.narrow(0, start, min(step, begin + count - start))
            part.copy_(_listed_down(table, rows, place, len(part)))
            add(part, start)
            place += len(part)
    for at_covers in rows.blocks:
        # Every stretch gets its messages and its products while it is cached.
        for stretch in _stretches(at_covers, out):
            block = stretch[0]
            _broadcast(stretch, table, block.view(out))
            add(out.narrow(0, block.start, block.num_rows), block.start)
    return out


def _broadcast(at_covers: Sequence[LargeBlock], table: Tensor, view: Tensor) -> None:
    """Writes the sums of the rows of all covers to the rows of a block, `[*sizes, width]`."""
    size, width = view.shape[-2:]
    # A value for many rows is repeated first, since torch broadcasts slowly along short axes.
    times = _largest_divisor(size, _LONG_ROW // max(width, 1)) if view.is_cpu else 1
    view = view.view(*view.shape[:-2], size // times, times * width)
    messages = []
    for block in at_covers:
        x = block.coarse(table)
        if x.shape[-2] == 1:
            messages.append(x.repeat(*[1] * (x.dim() - 1), times))
        else:
            messages.append(x.reshape(*x.shape[:-2], size // times, times * width))
    first, *others = messages
    if others:
        torch.add(first, others[0], out=view)
    else:
        view.copy_(first)
    for other in others[1:]:
        view.add_(other)


@lru_cache(maxsize=256)
def _largest_divisor(number: int, most: int) -> int:
    return next(i for i in range(max(1, min(most, number)), 0, -1) if number % i == 0)


def _cached_rows(x: Tensor) -> int:
    """The number of rows of a tensor to process at a time; on the CPU, they stay in its cache."""
    if not x.is_cpu:
        return 2**62
    return max(_CACHED * torch.get_num_threads() // (x.shape[1] or 1), _FEWEST_ROWS)


def _stretches(at_covers: Sequence[LargeBlock], x: Tensor) -> Iterator[list[LargeBlock]]:
    """Splits a block, given for each of its covers, into stretches along its slowest index."""
    if any(0 in block.kept[1:] for block in at_covers):
        yield list(at_covers)
        return
    whole = at_covers[0].sizes[0]
    step = max(1, _cached_rows(x) * whole // at_covers[0].num_rows)
    for start in range(0, whole, step):
        yield [block.stretch(start, step) for block in at_covers]


def _bag_listed(x: Tensor, bags: Sequence[Tensor]) -> Tensor:
    for i in range(0, len(bags), 2):
        x = bag_rows(x, bags[i], bags[i + 1])
    return x


def _listed_down(table: Tensor, rows: Rows, start: int, count: int) -> Tensor:
    """Sums the rows of all covers for some of the listed rows."""
    num_covers = len(rows.groupings)
    cover_rows = rows.cover_rows.narrow(0, start * num_covers, count * num_covers)
    if num_covers == 1:
        return table.index_select(0, cover_rows)
    # All rows have the same number of covers, so the first pointers are valid for any rows.
    return bag_rows(table, cover_rows, rows.cover_pointers.narrow(0, 0, count + 1))


def bag_rows(x: Tensor, rows: Tensor, pointers: Tensor) -> Tensor:
    """Sums rows `rows[pointers[i]:pointers[i + 1]]` of a tensor, for every `i`."""
    if not x.shape[1]:
        return x.new_zeros(pointers.shape[0] - 1, 0)
    if x.requires_grad:  # `embedding_bag` would prepare its own backward.
        x = x.detach()
    return torch.embedding_bag(x, rows, pointers, include_last_offset=True)[0]


def where_positive(x: Tensor, gate: Tensor, out: Tensor | None = None) -> Tensor:
    """`x` where the gate is positive, else 0. Gated by itself, it is the ReLU of `x`."""
    if out is None:
        return torch.ops.aten.threshold_backward(x, gate, 0)
    return torch.ops.aten.threshold_backward.grad_input(x, gate, 0, grad_input=out)


class _Gated(torch.autograd.Function):
    """A linear function of rows, given their grouping and optionally a gate of the finer rows."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keeps only the grouping and the gate."""
        _, ctx.grouping, gate = inputs
        ctx.save_for_backward(gate)


class SegmentSum(_Gated):
    """:func:`plain_segment_sum`, differentiable any number of times.

    With a gate, it sums only the values at which the gate is positive. Gated by its own input, it
    is the sum of a ReLU that keeps no other tensor and computes its gradient in one piece of
    memory.
    """

    @staticmethod
    def forward(x: Tensor, grouping: Grouping, gate: Tensor | None) -> Tensor:
        """Sums."""
        return bag_sum(x if gate is None else where_positive(x, gate), grouping)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Expands."""
        (gate,) = ctx.saved_tensors
        if not is_transformed():
            return Expand.apply(grads[0], ctx.grouping, gate), None, None
        out = plain_expand(grads[0], ctx.grouping)
        return (out if gate is None else out.where(gate > 0, 0)), None, None


class Expand(_Gated):
    """The adjoint of :class:`SegmentSum`: :func:`plain_expand`, also differentiable many times."""

    @staticmethod
    def forward(x: Tensor, grouping: Grouping, gate: Tensor | None) -> Tensor:
        """Expands."""
        out = expand_rows(x, grouping)
        return out if gate is None else where_positive(out, gate, out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Sums."""
        (gate,) = ctx.saved_tensors
        if not is_transformed():
            return SegmentSum.apply(grads[0], ctx.grouping, gate), None, None
        x = grads[0] if gate is None else grads[0].where(gate > 0, 0)
        return plain_segment_sum(x, ctx.grouping), None, None
