"""Reads safetensors files: small ones at once, large ones mapped into memory.

The safetensors library drops one of two tensors with the same name, and allocates as much memory as
a header asks for. Therefore headers are checked before it reads a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError, require
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import (
    MAP_FROM,
    OpenedFile,
    check_tensors,
    check_unique,
    complete,
)

# The header entry for metadata.
_NOTES = "__metadata__"
# The format sorts tensors by dtype and name; this entry keeps the order of a state dict.
_ORDER = "nfn_graph.keys"
_MAX_HEADER = 100_000_000
# Parsing takes many times the memory of the text, some hundred bytes per value. The largest
# networks have some tens of thousands of tensors.
_MAX_VALUES = 2**22
_MAX_TENSORS = 100_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The types that a file can hold.
DTYPES = frozenset(_DTYPES.values())


class SafetensorsFile(NamedTuple):
    """The contents of a file.

    Attributes:
        tensors: The tensors in the order of the saved state dict, or in that of the file.
        metadata: The metadata in its header.
    """

    tensors: dict[str, Tensor]
    metadata: Mapping[str, str]


def recognise(opened: OpenedFile) -> bool:
    """Whether a file begins with a safetensors header of a possible size."""
    if opened.head[8:9] != b"{":
        return False
    length = int.from_bytes(opened.head[:8], "little")
    if 2 <= length <= opened.size - 8:
        return True
    # An ONNX model may begin with the same bytes.
    if opened.head[:1] != b"\x08" and length < 2**32:
        raise ConversionError(
            f"Expected a safetensors header of {length} bytes in '{opened.path}' (got a file of "
            f"{opened.size} bytes, which is truncated)"
        )
    return False


def read(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a file."""
    return read_file(path).tensors


def read_file(path: Path, map_from: int = MAP_FROM) -> SafetensorsFile:
    """Reads the tensors and metadata of a file; tensors share its mapped memory.

    Args:
        path: The file.
        map_from: The size in bytes from which the file is mapped into memory instead of read.
    """
    purpose = "to read .safetensors files"
    library, with_torch = require("safetensors", purpose), require("safetensors.torch", purpose)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = _header_size(path, file.read(8), size)
        header = _parse(path, file.read(length))
    metadata = header.pop(_NOTES, {})
    _check_types(path, header)
    with complete(path, "safetensors file"):
        if size < map_from:
            found = with_torch.load(path.read_bytes())
        else:
            with library.safe_open(path, "pt") as opened:
                found = {key: opened.get_tensor(key) for key in header}
        places = {key: tuple(entry["data_offsets"]) for key, entry in header.items()}
        tensors = {key: found[key] for key in sorted(places, key=lambda key: places[key])}
    if any(tensor.is_complex() for tensor in tensors.values()):
        check_tensors(path, tensors)
    if _ORDER in metadata:
        tensors = {key: tensors[key] for key in _order(path, tensors, metadata)}
    return SafetensorsFile(tensors, metadata)


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors; a tensor with two keys is written twice."""
    library = require("safetensors.torch", "to write .safetensors files")
    unshared: dict[str, Tensor] = {}
    storages: set[int] = set()
    for key, tensor in tensors.items():
        if key == _NOTES or tensor.dtype not in DTYPES:
            raise ConversionError(
                f"Expected a key and a type that safetensors files support for '{path}' (got "
                f"'{key}' of {tensor.dtype}). Save to .pt."
            )
        dense = tensor.detach().cpu().contiguous()
        pointer = dense.untyped_storage().data_ptr()
        unshared[key] = dense.clone() if pointer in storages else dense
        storages.add(pointer)
    notes = {"format": "pt", **(metadata or {})}
    by_rule = sorted(unshared, key=lambda key: (-unshared[key].element_size(), key))
    if list(unshared) != by_rule:
        notes[_ORDER] = json.dumps(list(unshared))
    with replacing(path) as temporary:
        library.save_file(unshared, temporary, notes)


def _header_size(path: Path, head: bytes | bytearray, size: int) -> int:
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, _MAX_HEADER):
        raise _damaged(path, f"a header of {length} bytes in {size}")
    return length


def _check_counts(path: Path, text: bytes) -> None:
    """Refuses a header that would take too much memory and time to parse."""
    tensors, values = text.count(b'"data_offsets"'), text.count(b",") + text.count(b":")
    if tensors > _MAX_TENSORS or values > _MAX_VALUES:
        raise ConversionError(
            f"Expected a header of at most {_MAX_TENSORS} tensors and {_MAX_VALUES} values in "
            f"'{path}' (got {tensors} and {values}). Save fewer tensors, or less metadata."
        )


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            check_unique(path, [key for key, _ in pairs])
        return found

    _check_counts(path, text)
    try:
        header = json.loads(text)
        # Most files have no repeated names and need no further check.
        if text.count(b"data_offsets") != len(header) - (_NOTES in header):
            header = json.loads(text, object_pairs_hook=unique)
    except ConversionError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, f"a header that is not a JSON object of tensors: {error}") from error
    if not isinstance(header, dict) or not isinstance(header.get(_NOTES, {}), dict):
        raise _damaged(path, "a header without named tensors")
    return header


def _check_types(path: Path, header: Mapping[str, Any]) -> None:
    """Refuses types that could not be written again."""
    for key, value in header.items():
        kind = value.get("dtype") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in _DTYPES:
            raise ConversionError(
                f"Expected '{key}' of '{path}' in a supported type: {', '.join(_DTYPES)} (got "
                f"{kind[:40]!r})"
            )


def _order(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> list[str]:
    """Returns the recorded order of the keys, or that of the file if the keys have changed."""
    try:
        order = json.loads(metadata[_ORDER])
    except (TypeError, ValueError, RecursionError) as error:
        raise _damaged(path, f"an order of keys that is not JSON: {error}") from error
    if not isinstance(order, list) or any(not isinstance(key, str) for key in order):
        raise _damaged(path, "an order of keys that is not a list of names")
    # Another program may have added or dropped tensors without updating the order.
    return order if sorted(order) == sorted(tensors) else list(tensors)


def _damaged(path: Path, got: str) -> ConversionError:
    return ConversionError(
        f"Expected a complete safetensors file in '{path}' (got {got}). It is truncated or damaged."
    )
