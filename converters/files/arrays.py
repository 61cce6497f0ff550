"""NumPy arrays as tensors and back, with a bfloat16 that NumPy does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError

Array = np.ndarray[Any, Any]


def from_array(path: Path, key: str, array: Array) -> Tensor:
    """A tensor over the memory of an array, if that is possible.

    Two bytes without a type are a bfloat16: so the package ml_dtypes, and with it JAX and
    Keras, writes them.
    """
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16 or array.dtype == np.longdouble:
        raise ConversionError(
            f"Expected numbers in array '{key}' of '{path}' (got the type {array.dtype})"
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def to_array(key: str, tensor: Tensor) -> Array:
    """The array of a tensor, bit for bit."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.view(torch.int16).numpy()
        return array.view(np.dtype("V2"))
    try:
        return tensor.numpy()
    except TypeError as error:
        raise ConversionError(
            f"Expected tensor '{key}' of a type that NumPy has (got {tensor.dtype}). Save to "
            f".safetensors or .pt."
        ) from error
