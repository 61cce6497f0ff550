"""Checks that readers make before they trust a file."""

from __future__ import annotations

import math
import os
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError

# Files of at least this size are mapped into memory. Smaller ones are read, because a process can
# map only some tens of thousands of files.
MAP_FROM = 2**20
# The largest compression ratio of deflate, which zip and HDF5 files use.
MAX_COMPRESSION = 1032


class OpenedFile(NamedTuple):
    """The information by which the format of a file is detected.

    Attributes:
        path: The file.
        head: Its first bytes.
        size: Its number of bytes.
        entries: The entries of a zip archive.
    """

    path: Path
    head: bytes
    size: int
    entries: Sequence[zipfile.ZipInfo] = ()

    @property
    def is_archive(self) -> bool:
        """Whether it begins like a zip archive."""
        return self.head.startswith(b"PK\x03\x04")

    @property
    def names(self) -> list[str]:
        """The names of the entries of a zip archive."""
        return [entry.filename for entry in self.entries]


@contextmanager
def complete(path: Path, what: str) -> Iterator[None]:
    """Turns anything that a library raises on a damaged file into an error that names the file."""
    try:
        yield
    except (ConversionError, FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        raise ConversionError(
            f"Expected a complete {what} in '{path}' (got one that cannot be read: "
            f"{type(error).__name__}: {error}). It is truncated or damaged."
        ) from error


def open_file(path: str | Path) -> OpenedFile:
    """Reads the beginning of a file and, for a zip archive, its directory."""
    path = check_path(path)
    with open(path, "rb") as file:
        found = OpenedFile(path, file.read(512), os.fstat(file.fileno()).st_size)
    return found._replace(entries=read_entries(path)) if found.is_archive else found


def read_entries(path: Path) -> list[zipfile.ZipInfo]:
    """Returns the entries in the directory of a zip archive."""
    with complete(path, "zip archive"), zipfile.ZipFile(path) as archive:
        return archive.infolist()


def check_path(path: str | Path) -> Path:
    """Returns the path of a file that must exist and not be empty."""
    path = check_regular(path)
    if path.stat().st_size == 0:
        raise ConversionError(f"Expected a checkpoint in '{path}' (got an empty file)")
    return path


def check_regular(path: str | Path) -> Path:
    """Returns the path of a file that must exist and be regular, since opening a pipe may block."""
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"Expected a file (got '{path}', which does not exist)") from error
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise ConversionError(f"Expected a file (got '{path}', which is {kind})")
    return path


def check_declared(
    path: Path, key: str, shape: Sequence[int], itemsize: int, available: int
) -> None:
    """Refuses a tensor that declares more bytes than its file can hold, before allocating it."""
    declared = math.prod(shape) * itemsize
    if any(size < 0 for size in shape) or declared > available:
        raise ConversionError(
            f"Expected tensor '{key}' of '{path}' to take at most the {available} bytes that "
            f"the file holds for it (got shape {list(shape)}, {declared} bytes). The file is "
            f"truncated or damaged."
        )


def check_unique(path: Path, keys: Sequence[str]) -> None:
    """Refuses a file with two tensors of the same name, because readers would drop one."""
    if len(set(keys)) != len(keys):
        shown = ", ".join(map(repr, repeated(keys)[:5]))
        raise ConversionError(f"Expected every key once in '{path}' (got {shown} twice)")


def repeated(keys: Sequence[str]) -> list[str]:
    """Returns the keys that occur more than once."""
    return sorted(key for key, count in Counter(keys).items() if count > 1)


def check_tensors(path: Path, tensors: Mapping[Any, Any]) -> None:
    """Refuses complex, sparse, quantised and oversized tensors, also in nested mappings."""
    _check_tensors(path, tensors, path.stat().st_size, "", 0)


def _check_tensors(
    path: Path, tensors: Mapping[Any, Any], size: int, prefix: str, depth: int
) -> None:
    for key, value in tensors.items():
        if isinstance(value, Tensor):
            _check_tensor(path, f"{prefix}{key}", value, size)
        elif isinstance(value, Mapping) and depth < 4:
            _check_tensors(path, value, size, f"{prefix}{key}.", depth + 1)


def _check_tensor(path: Path, key: str, tensor: Tensor, size: int) -> None:
    if tensor.is_complex():
        kind = f"the complex type {tensor.dtype}, whose parts are not separate weights"
    elif tensor.layout != torch.strided:
        kind = f"the layout {tensor.layout}; call to_dense() before saving"
    elif tensor.is_quantized:
        kind = f"the quantised type {tensor.dtype}; call dequantize() before saving"
    elif tensor.device.type != "cpu":
        kind = f"a tensor without data on the device '{tensor.device}'"
    else:
        if tensor.numel() * tensor.element_size() > size:
            check_declared(path, key, tensor.shape, tensor.element_size(), size)
        return
    raise ConversionError(f"Expected a dense real tensor '{key}' in '{path}' (got {kind})")
