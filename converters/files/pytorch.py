"""Reads and writes files of `torch.save`, in the zip format and in the legacy format.

Only this file of the package calls `torch.load`, always with `weights_only=True`: it reads tensors
and plain containers, and executes nothing in the file.
"""

from __future__ import annotations

import importlib
import mmap
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import (
    MAP_FROM,
    MAX_COMPRESSION,
    OpenedFile,
    check_declared,
    check_tensors,
    check_unique,
    read_entries,
)
from nfn_graph.messages import UserError

_MOST_SHOWN = 5
_LEGACY_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def recognise(opened: OpenedFile) -> bool:
    """Whether a file was written by torch.save, in either of its formats."""
    parts = {name.split("/", 1)[-1] for name in opened.names}
    if "constants.pkl" in parts:
        raise ConversionError(
            f"Expected tensors in '{opened.path}' (got a TorchScript archive, which is a program). "
            f"Open it with torch.jit.load if you trust it, and convert its state_dict()."
        )
    return "data.pkl" in parts or is_legacy(opened)


def is_legacy(opened: OpenedFile) -> bool:
    """Whether a file is in the legacy format, without a zip archive."""
    return opened.head[:1] == b"\x80" and _LEGACY_MAGIC in opened.head[:32]


def read_opened(opened: OpenedFile, safe_globals: Sequence[str] = ()) -> Mapping[str, Any]:
    """Reads a file whose format was detected; see :func:`read`."""
    return read(opened.path, is_legacy(opened), opened.entries, safe_globals)


def read(
    path: Path,
    legacy: bool = False,
    entries: Sequence[zipfile.ZipInfo] | None = None,
    safe_globals: Sequence[str] = (),
) -> Mapping[str, Any]:
    """Reads the saved mapping, including nested mappings.

    Large files in the zip format stay mapped, so a tensor is read only when it is used.

    Args:
        path: The file.
        legacy: Whether the file is in the legacy format.
        entries: The entries of the archive, if they were read before.
        safe_globals: Names of classes and functions that the file may use in addition to those that
            torch allows, such as `numpy.dtype`. Reading the file calls them, so name only what you
            trust.
    """
    allowed = torch.serialization.safe_globals(_imported(safe_globals))
    try:
        can_map = False
        with allowed:
            if legacy:
                _check_legacy(path)
            else:
                can_map = _can_map(path, read_entries(path) if entries is None else entries)
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except ConversionError:
        raise
    except Exception as error:  # torch raises many kinds of errors on damaged files.
        with allowed:
            raise ConversionError(_explain(path, error)) from error
    if isinstance(loaded, (list, tuple)) and len(loaded) == 1:
        (loaded,) = loaded
    if not isinstance(loaded, Mapping):
        raise ConversionError(
            f"Expected a mapping of names to tensors in '{path}' (got {type(loaded).__name__}). "
            f"Save model.state_dict()."
        )
    check_tensors(path, loaded)
    return loaded


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a state dict in the zip format."""
    with replacing(path) as temporary:
        torch.save({key: _compact(value) for key, value in tensors.items()}, temporary)


def _compact(value: Any) -> Any:
    """Copies a tensor that is a part of a larger storage, because torch.save writes all of it."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        storage = value.untyped_storage().nbytes()
        return value.clone() if storage > value.numel() * value.element_size() else value
    return value


def _can_map(path: Path, entries: Sequence[zipfile.ZipInfo]) -> bool:
    """Checks the archive, and returns whether its tensors can be mapped into memory."""
    check_unique(path, [entry.filename for entry in entries])
    for entry in entries:
        available = entry.compress_size * (MAX_COMPRESSION if entry.compress_type else 1)
        if entry.file_size > available:
            check_declared(path, entry.filename, [entry.file_size], 1, available)
    stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    return stored and path.stat().st_size >= MAP_FROM


def _check_legacy(path: Path) -> None:
    """Checks shapes without reading data, because the legacy format allocates declared tensors.

    The file is mapped. A text that declares more bytes than the file has is then cut off, whereas
    reading it would first allocate all of them.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        FakeTensorMode(),
    ):
        readable = cast(IO[bytes], mapped)
        loaded = torch.load(readable, map_location="cpu", weights_only=True)
    size = path.stat().st_size
    for key, tensor in _tensors(loaded, ""):
        check_declared(path, key, [tensor.untyped_storage().nbytes()], 1, size)


def _tensors(value: Any, key: str) -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(key, value)] if value.layout == torch.strided else []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return []
    return [found for k, v in items for found in _tensors(v, f"{key}.{k}" if key else str(k))]


def _explain(path: Path, error: Exception) -> str:
    message = str(error)
    if "Unsupported global" in message or "weights_only" in message:
        names = _unsafe_globals(path, message)
        if not names:
            reason = message.strip().splitlines()[-1]
            return (
                f"Expected tensors and plain containers in '{path}' (got something else: {reason})"
            )
        shown = ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
        advice = (
            "Save model.state_dict() instead of a whole module."
            if any(name.startswith("torch.nn.") for name in names)
            else f"If you trust them, pass safe_globals={names}, or save the state dict alone."
        )
        return (
            f"Expected tensors and plain containers in '{path}' (got objects made by {shown}, "
            f"which torch does not load by default). {advice}"
        )
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return (
        f"Expected a complete file of torch.save in '{path}' (got one that cannot be read: "
        f"{type(error).__name__}: {first}). It is truncated or damaged."
    )


def _unsafe_globals(path: Path, message: str) -> list[str]:
    """Returns the names in a file that are not allowed; only the first in the legacy format."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # The file is in the legacy format or damaged.
        return re.findall(r"GLOBAL ([\w.]+)", message)[:1]


def _imported(names: Sequence[str]) -> list[Any]:
    """Imports classes and functions by name, for :func:`torch.serialization.safe_globals`."""
    found: list[Any] = []
    for name in names:
        module, _, attribute = name.rpartition(".")
        try:
            with warnings.catch_warnings():
                # NumPy warns about the names in files of older versions.
                warnings.simplefilter("ignore", DeprecationWarning)
                found.append((getattr(importlib.import_module(module), attribute), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise UserError(
                f"Expected names in safe_globals that can be imported (got '{name}': {error})"
            ) from error
        if name.startswith("numpy."):
            # Every type has its own subclass of numpy.dtype.
            found += (getattr(np.dtypes, kind) for kind in np.dtypes.__all__)
    return found
