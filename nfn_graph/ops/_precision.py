"""The dtype of computations."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast asks for on a device; None if autocast is off."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turns autocast off on a device inside a `with` block.

    Example:
        >>> import torch
        >>> from nfn_graph.ops import without_autocast
        >>> x = torch.ones(2, 2)
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast(x.device):
        ...     (x @ x).dtype
        torch.float32
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes `x.to(dtype)`, without the cost of a call if the dtype is already right."""
    return x if x.dtype is dtype else x.to(dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float16 overflows above 65,504, so they use at least float32.

    Example:
        >>> import torch
        >>> from nfn_graph.ops import sum_dtype
        >>> sum_dtype(torch.float16), sum_dtype(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.float32 if dtype is torch.float32 else torch.promote_types(dtype, torch.float32)
