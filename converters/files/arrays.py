"""NumPy arrays as tensors and back, with a bfloat16 that NumPy does not know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError

Array = np.ndarray[Any, Any]


def from_array(what: str, array: Array) -> Tensor:
    """A tensor over the memory of an array, if that is possible.

    Two bytes without a type are a bfloat16: so the package ml_dtypes, and with it JAX and
    Keras, writes them.

    Args:
        what: What the array is, for errors.
        array: Numbers in any order of bytes and axes.
    """
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        return from_array(what, array.view(np.int16)).view(torch.bfloat16)
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not native.flags.writeable or min(native.strides, default=1) < 0:
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError as error:
        raise ConversionError(f"Expected numbers in {what} (got the type {array.dtype})") from error


def from_arrays(path: Path, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """The tensors of a file's arrays."""
    return {key: from_array(f"array '{key}' of '{path}'", array) for key, array in arrays.items()}


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
