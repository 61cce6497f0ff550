"""Safetensors files, mapped into memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import check_tensors, check_unique
from nfn_graph.converters.optional import require

# The format sorts tensors by dtype and name; this entry keeps the order of a state dict.
_ORDER = "nfn_graph.keys"
# As in files/pytorch.py: small files are read, large ones mapped.
MAP_FROM = 2**20
_MAX_HEADER = 100_000_000


def read(path: Path, header: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """The tensors in the order of the state dict that was saved, or of the file.

    Args:
        path: The file.
        header: Its header, if it was read before.
    """
    entries = dict(read_header(path) if header is None else header)
    metadata = entries.pop("__metadata__", {})
    library = require("safetensors", "to read .safetensors files")
    try:
        if path.stat().st_size < MAP_FROM:
            found = require("safetensors.torch", "to read .safetensors files").load(
                path.read_bytes()
            )
        else:
            with library.safe_open(path, framework="pt", device="cpu") as file:
                found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        tensors = {key: found[key] for key in _order(entries, metadata)}
    except Exception as error:  # the library raises its own and Python's errors
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    check_tensors(path, tensors)
    return tensors


def write(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes tensors; a tensor under two keys is written twice."""
    library = require("safetensors.torch", "to write .safetensors files")
    unshared: dict[str, Tensor] = {}
    storages: set[int] = set()
    for key, tensor in tensors.items():
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


def read_header(path: Path) -> dict[str, Any]:
    """The header: `__metadata__`, and dtype, shape and position of every tensor."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size, _MAX_HEADER):
            raise _damaged(path, f"a header of {length} bytes")
        text = file.read(length)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        check_unique(path, [key for key, _ in pairs])
        return dict(pairs)

    try:
        header = json.loads(text, object_pairs_hook=unique)
    except ConversionError:
        raise
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"a header that is no JSON: {error}") from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict):
        raise _damaged(path, "a header without named tensors")
    return header


def _order(header: dict[str, Any], metadata: dict[str, str]) -> list[str]:
    if _ORDER in metadata:
        order = json.loads(metadata[_ORDER])
        if isinstance(order, list) and sorted(map(str, order)) == sorted(header):
            return order
    return sorted(header, key=lambda key: (tuple(header[key]["data_offsets"]), key))


def _damaged(path: Path, got: str) -> ConversionError:
    return ConversionError(
        f"Expected a complete safetensors file in '{path}' (got {got}). It is truncated or damaged."
    )
