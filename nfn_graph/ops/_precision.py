"""In which dtype things are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast asks for on a device; None where it is off."""
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return None


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A block in which autocast is off on a device.

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
    """`x.to(dtype)`, without the cost of a call where nothing is to be done."""
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
