"""Products of many rows with a small matrix, outside of autograd.

On the CPU, torch multiplies float32 matrices with MKL. MKL is slow for few columns on all
processors, and it does not use the widest instructions of processors that Intel did not make.
oneDNN, which torch ships for its compiler, uses them. On an AMD EPYC with AVX-512 it was 2.4 times
as fast for 64 channels and 3 times as fast for 2 to 8. Small products stay with MKL, whose calls
are cheaper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import islice

import torch
from torch import Tensor

# Products of fewer multiplications are faster in MKL, unless they have few columns and many rows.
_MULTIPLICATIONS = 2**22
_FEW_COLUMNS, _MANY_COLUMNS, _MANY_ROWS = 8, 32, 2**12
# For few rows, the copy of the matrix in oneDNN's own order costs memory and saves little time.
_FEWEST_ROWS = 2**9
# For a sum over many rows oneDNN copies both factors first, which only pays off for wide rows.
# Processing a few rows at a time takes less memory.
_WIDE, _STRETCH = 256, 2**10


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Computes `x @ matrix`, for `x` with many rows."""
    linear = _linear(x, matrix)
    return x @ matrix if linear is None else linear(x, matrix.t(), None, "none", [], "")


def add_product(messages: Tensor, x: Tensor, matrix: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes `messages + x @ matrix`, in place unless `out` is given."""
    # MKL needs no memory for the product itself; oneDNN makes up for it with few or many columns.
    linear = None if _FEW_COLUMNS < matrix.shape[1] < _MANY_COLUMNS else _linear(x, matrix)
    if linear is not None:
        own = linear(x, matrix.t(), None, "none", [], "")
        return messages.add_(own) if out is None else torch.add(messages, own, out=out)
    return messages.addmm_(x, matrix) if out is None else torch.addmm(messages, x, matrix, out=out)


def sum_of_products(y: Tensor, x: Tensor) -> Tensor:
    """Computes `y.t() @ x`, the sum of the outer products of many rows."""
    linear = _linear(y, x) if min(x.shape[1], y.shape[1]) >= _WIDE else None
    if linear is None:
        return y.t() @ x
    parts = zip(y.split(_STRETCH), x.split(_STRETCH), strict=True)
    found = [linear(a.t(), b.t(), None, "none", [], "") for a, b in islice(parts, 1)]
    for a, b in parts:
        found[0].add_(linear(a.t(), b.t(), None, "none", [], ""))
    return found[0]


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
