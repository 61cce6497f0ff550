"""Products of many rows with a small matrix, outside of autograd.

On the CPU, torch multiplies float32 matrices with MKL. MKL is slow for few columns on all
processors, and it does not use the widest instructions of processors that Intel did not make.
oneDNN, which torch ships for its compiler, uses them. On an AMD EPYC with AVX-512 it was 2.4 times
as fast for 64 channels and 3 times as fast for 2 to 8. Small products stay with MKL, whose calls
are cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
from torch import Tensor

# Products of fewer multiplications are faster in MKL, unless they have few columns and many rows.
_MULTIPLICATIONS = 2**22
_FEW_COLUMNS, _MANY_COLUMNS, _MANY_ROWS = 8, 32, 2**12
# For few rows, the copy of the matrix in oneDNN's own order costs memory and saves little time.
_FEWEST_ROWS = 2**9
# For a sum over many rows oneDNN copies both factors first, which only pays off for wide rows.
_WIDE = 256
# oneDNN copies matrices into an order of its own, and always returns a new tensor. For blocks of
# 512 x 512, the allocator can reuse the memory of both, and a product is still in the cache when it
# is added to the messages. Narrower blocks, and those of several threads, have more rows, because
# every call costs time.
_SIDE = 2**9


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Computes `x @ matrix`, for `x` with many rows."""
    linear = _linear(x, matrix)
    if linear is None:
        return x @ matrix
    if matrix.numel() <= _SIDE**2:
        return linear(x, matrix.t(), None, "none", [], "")
    out = x.new_empty(x.shape[0], matrix.shape[1])
    for block, own in _blocks(linear, x, matrix):
        out[block] = own
    return out


def add_product(messages: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """Computes `messages + x @ matrix` in place."""
    # MKL needs no memory for the product itself; oneDNN makes up for it with few or many columns.
    linear = None if _FEW_COLUMNS < matrix.shape[1] < _MANY_COLUMNS else _linear(x, matrix)
    if linear is None:
        return messages.addmm_(x, matrix)
    for block, own in _blocks(linear, x, matrix):
        messages[block].add_(own)
    return messages


def sum_of_products(y: Tensor, x: Tensor) -> Tensor:
    """Computes `y.t() @ x`, the sum of the outer products of many rows."""
    linear = _linear(y, x) if min(x.shape[1], y.shape[1]) >= _WIDE else None
    if linear is None:
        return y.t() @ x
    total = y.new_zeros(y.shape[1], x.shape[1])
    for some_y, some_x in zip(y.split(_SIDE), x.split(_SIDE), strict=True):
        for block, own in _blocks(linear, some_y.t().contiguous(), some_x):
            total[block].add_(own)
    return total


def _blocks(
    linear: Callable[..., Tensor], x: Tensor, matrix: Tensor
) -> Iterator[tuple[tuple[slice, slice], Tensor]]:
    """Computes `x @ matrix` in blocks, and yields where each of them belongs."""
    num_columns = min(matrix.shape[1], _SIDE)
    num_rows = _SIDE**2 * torch.get_num_threads() // num_columns
    for j in range(0, matrix.shape[1], num_columns):
        columns = slice(j, j + num_columns)
        other = matrix[:, columns].contiguous().t()
        for i in range(0, x.shape[0], num_rows):
            rows = slice(i, i + num_rows)
            yield (rows, columns), linear(x[rows], other, None, "none", [], "")


def _linear(x: Tensor, other: Tensor) -> Callable[..., Tensor] | None:
    """oneDNN's linear map, or None if it is not available or not faster."""
    columns = other.shape[1]
    if x.numel() * columns < _MULTIPLICATIONS and not (
        1 < columns <= _FEW_COLUMNS and x.shape[0] >= _MANY_ROWS
    ):
        return None
    if (
        x.shape[0] < _FEWEST_ROWS
        or x.dtype is not torch.float32
        or x.device.type != "cpu"
        or type(x) is not Tensor  # A mode in which tensors have no values.
        or columns == 1
        or not torch._C._get_mkldnn_enabled()
    ):
        return None
    return _onednn_linear()


@lru_cache(maxsize=1)
def _onednn_linear() -> Callable[..., Tensor] | None:
    """The operation behind compiled linear layers; None if this build of torch lacks it."""
    try:
        found: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        works = torch.equal(found(x, x.t(), None, "none", [], ""), x @ x)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return found if works else None
