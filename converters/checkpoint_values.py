"""The values that state dicts and channels may hold: dense tensors, and arrays as such."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.arrays import from_array


def is_numeric(value: Any) -> bool:
    """Whether a value is a tensor or an array."""
    return isinstance(value, (Tensor, np.ndarray))


def is_plain(value: Any) -> bool:
    """Whether a value is a tensor with its numbers side by side."""
    is_tensor = isinstance(value, Tensor) and value.layout == torch.strided
    return is_tensor and not (value.is_quantized or value.is_nested)


def as_tensor(what: str, value: Any) -> Any:
    """An array as a tensor over its memory, if that is possible; another value as it is.

    Args:
        what: What the value is, for errors.
        value: A value of a state dict.
    """
    if isinstance(value, np.ndarray):
        return from_array(what, value)
    if not isinstance(value, Tensor) or is_plain(value):
        return value
    got = (
        "a nested one"
        if value.is_nested
        else f"the quantised type {value.dtype}; call dequantize()"
    )
    if value.layout != torch.strided and not value.is_nested:
        got = f"the layout {value.layout}; call to_dense()"
    raise ConversionError(f"Expected a dense tensor of numbers as {what} (got {got})")
