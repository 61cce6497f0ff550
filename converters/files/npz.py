"""Converts NumPy arrays to tensors and back, and reads and writes `.npz` archives without pickles.

bfloat16, which NumPy does not support, is stored as an untyped pair of bytes (`V2`).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import (
    MAX_COMPRESSION,
    OpenedFile,
    check_declared,
    check_tensors,
    check_unique,
    complete,
)

Array = np.ndarray[Any, Any]


def from_array(what: str, array: Array) -> Tensor:
    """Converts an array to a tensor, over its memory if possible.

    An untyped pair of bytes is a bfloat16: this is how the package ml_dtypes, and with it JAX and
    Keras, writes them.
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
    """Converts the arrays of a file to tensors."""
    return {key: from_array(f"array '{key}' of '{path}'", array) for key, array in arrays.items()}


def to_array(key: str, tensor: Tensor) -> Array:
    """Converts a tensor to an array, bit for bit."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        array: Array = tensor.view(torch.int16).numpy()
        return array.view(np.dtype("V2"))
    try:
        return tensor.numpy()
    except TypeError as error:
        raise ConversionError(
            f"Expected tensor '{key}' of a type that NumPy supports (got {tensor.dtype}). Save to "
            f".safetensors or .pt."
        ) from error


# Entries have a fixed date, so that equal tensors result in equal files.
_DATE = (1980, 1, 1, 0, 0, 0)


def recognise(opened: OpenedFile) -> bool:
    """Whether a file is an archive of arrays."""
    return bool(opened.names) and all(name.endswith(".npy") for name in opened.names)


def read(path: Path) -> dict[str, Tensor]:
    """Reads the arrays in the order of the archive."""
    with complete(path, ".npz file"), zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        check_unique(path, [entry.filename for entry in entries])
        tensors = {
            entry.filename.removesuffix(".npy"): _read_entry(path, archive, entry)
            for entry in entries
        }
    check_tensors(path, {key: x for key, x in tensors.items() if x.is_complex()})
    return tensors


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes arrays as `numpy.savez` does."""
    with replacing(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for key, tensor in tensors.items():
            entry = zipfile.ZipInfo(f"{key}.npy", _DATE)
            if entry.filename != f"{key}.npy":
                raise ConversionError(
                    f"Expected a key that zip archives can hold for '{path}' (got {key!r}). Save "
                    f"to .safetensors or .pt."
                )
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, to_array(key, tensor), allow_pickle=False)
            archive.writestr(entry, buffer.getbuffer())


def _read_entry(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Tensor:
    key = entry.filename.removesuffix(".npy")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ConversionError(
            f"Expected array '{key}' of '{path}' to be stored or deflated, as NumPy writes it "
            f"(got compression method {entry.compress_type})"
        )
    ratio = MAX_COMPRESSION if entry.compress_type == zipfile.ZIP_DEFLATED else 1
    available = min(entry.compress_size, path.stat().st_size) * ratio
    check_declared(path, key, [entry.file_size], 1, available)
    with archive.open(entry) as file:
        shape, fortran_order, dtype = _read_array_header(file)
        if dtype.hasobject:
            raise ConversionError(
                f"Expected array '{key}' of '{path}' to hold numbers (got Python objects, which "
                f"can only be read by running a pickle)"
            )
        check_declared(path, key, shape, dtype.itemsize, entry.file_size - file.tell())
        data = bytearray(file.read())
    expected = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(data) != expected:
        raise ConversionError(
            f"Expected {expected} bytes in array '{key}' of '{path}' (got {len(data)}). It is "
            f"truncated or damaged."
        )
    what = f"array '{key}' of '{path}'"
    if not data:
        return from_array(what, np.empty(shape, dtype))
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype)
    return from_array(what, array.reshape(shape, order="F" if fortran_order else "C"))


def _read_array_header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    return np.lib.format.read_array_header_2_0(file)
