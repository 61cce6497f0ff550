"""Reads the files of a zoo, with errors that name the file and the record.

Checkpoints may hold objects of foreign classes. They are read without importing these classes.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import pytorch
from nfn_graph.converters.files.checks import check_regular, complete, repeated
from nfn_graph.converters.formats import PYTORCH, detect
from nfn_graph.converters.zoos.zoo import Row
from nfn_graph.messages import UserError

# Objects of OmegaConf store their members or their value under these names.
_MEMBERS, _VALUE = "_content", "_val"
_DEEPEST = 8


class StandIn:
    """Replaces an object of a class that is not imported. Keeps its arguments and its state."""

    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.state = {**(self.state or {}), key: value}


class CheckpointReader:
    """Reads files of torch.save, and remembers the names for which they needed stand-ins."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def read(self, path: Path) -> Mapping[str, Any]:
        """Reads what was saved, with stand-ins for objects of unknown classes."""
        try:
            return self._read(path)
        except ConversionError:
            if not self._add_names(path):
                raise
        return self._read(path)

    def _read(self, path: Path) -> Mapping[str, Any]:
        # Every name gets its own class, which exists only in this block.
        named: list[Any] = [(type(name, (StandIn,), {}), name) for name in sorted(self._names)]
        with torch.serialization.safe_globals(named):
            return read_checkpoint(path)

    def _add_names(self, path: Path) -> bool:
        """Adds the classes that a file names; returns whether any of them is new."""
        before = len(self._names)
        # A damaged file may raise any error here. `_read` has already raised the one to report.
        with suppress(Exception):
            self._names.update(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        return len(self._names) > before


def plain(value: Any, depth: int = 0) -> Any:
    """Converts a configuration of OmegaConf, or a plain one, to dicts, lists and values."""
    if isinstance(value, StandIn) and isinstance(value.state, Mapping):
        for name in (_MEMBERS, _VALUE):
            if name in value.state and depth < _DEEPEST:
                return plain(value.state[name], depth + 1)
    if isinstance(value, Mapping):
        return {key: plain(member, depth + 1) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member, depth + 1) for member in value]
    return value


# The number of rows that are converted to columns at once.
_TOGETHER = 4096


class Table(Sequence[Row]):
    """Rows that are created on access, because hundreds of thousands of dicts would not fit."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Table({name: values[index] for name, values in self.columns.items()})
        return {name: values[index] for name, values in self.columns.items()}


def read_table(path: Path, required: Sequence[str]) -> Table:
    """Reads a table with a header line; files with the suffix `.gz` are unpacked."""
    lines = _lines(path)
    names = next(lines, [])
    missing = [name for name in required if name not in names]
    if missing or len(set(names)) != len(names):
        raise ConversionError(
            f"Expected a header line with the columns {', '.join(required)}, each once, in "
            f"'{path}' (got {', '.join(names) or 'nothing'})"
        )
    columns: list[list[str]] = [[] for _ in names]
    number = 0
    while rows := list(islice(lines, _TOGETHER)):
        for cells in rows:
            number += 1
            if len(cells) != len(names):
                raise ConversionError(
                    f"Expected {len(names)} values in record {number} of '{path}' (got "
                    f"{len(cells)})"
                )
        for column, values in zip(columns, zip(*rows, strict=True), strict=True):
            # Most values occur thousands of times.
            column.extend(map(sys.intern, values))
    return Table({name: _typed(cells) for name, cells in zip(names, columns, strict=True)})


def _lines(path: Path) -> Iterator[list[str]]:
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    check_regular(path)
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            for cells in csv.reader(file, strict=True):
                number += 1
                yield cells
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ConversionError(
            f"Expected a complete table in '{path}' (got one that cannot be read after record "
            f"{max(number - 1, 0)}: {type(error).__name__}: {error}). It is truncated or damaged."
        ) from error


def _typed(cells: list[str]) -> Sequence[Any]:
    """Casts cells to integers or floats if all of them can be cast; empty cells become None."""
    for kind in (int, float):
        try:
            return list(map(kind, cells))
        except ValueError:
            continue
    try:
        return [float(cell) if cell else None for cell in cells]
    except ValueError:
        return cells


#: The folders in which Ray Tune keeps the checkpoints of a run, by number.
CHECKPOINT = re.compile(r"checkpoint_(\d+)")


def read_checkpoint(path: Path) -> Mapping[str, Any]:
    """Reads a file of torch.save after comparing the checksums in it.

    PyTorch writes a checksum for every tensor, but does not check it when reading.
    """
    format_, opened = detect(path)
    if format_ is not PYTORCH:
        raise ConversionError(f"Expected a file of torch.save in '{path}' (got {format_.name})")
    if opened.is_archive:
        _check_archive(path)
    return pytorch.read_opened(opened)


def _check_archive(path: Path) -> None:
    with complete(path, "file of torch.save"), zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ConversionError(
            f"Expected '{damaged}' in '{path}' to match its checksum (got different content). "
            f"The file is damaged."
        )


def state_dict_in(path: Path, tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns tensors by name, and raises for any other value."""
    for key, value in tensors.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ConversionError(
                f"Expected floating-point tensors in '{path}' (got '{key}' of {kind})"
            )
    return dict(tensors)


def read_json(path: Path) -> Any:
    """Reads a JSON file."""
    return parse_json(path, _text(path))


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the objects of a file with one object per line, with their line numbers."""
    for number, line in enumerate(_text(path).splitlines(), start=1):
        found = parse_json(path, line, f"line {number} of ")
        if not isinstance(found, dict):
            raise ConversionError(
                f"Expected an object in line {number} of '{path}' (got {type(found).__name__})"
            )
        yield number, found


def parse_json(path: Path, text: str, where: str = "") -> Any:
    """Parses JSON without repeated keys; `where` names the part of the file in errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise UserError(f"'{repeated([key for key, _ in pairs])[0]}' twice")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ConversionError(
            f"Expected complete JSON in {where}'{path}' (got: {error}). It is damaged."
        ) from error


def _text(path: Path) -> str:
    try:
        return check_regular(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(
            f"Expected text in UTF-8 in '{path}' (got byte {error.object[error.start]:#04x} at "
            f"position {error.start}). It is damaged."
        ) from error


def folders_in(path: Path) -> list[str]:
    """Returns the sorted names of the folders in a folder."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def files_in(path: Path, suffix: str = "") -> list[str]:
    """Returns the sorted names of the files in a folder with a suffix."""
    with os.scandir(path) as entries:
        return sorted(e.name for e in entries if e.name.endswith(suffix) and e.is_file())


def first_folders(path: Path, depth: int, most: int = 20) -> list[Path]:
    """Returns some folders at a depth below a folder, enough to recognise a layout."""
    found = [path]
    for _ in range(depth):
        found = [parent / name for parent in found for name in folders_in(parent)[:most]]
    return found


def has_checkpoints(path: Path, file: str) -> bool:
    """Whether a folder holds runs with `checkpoint_*/<file>`."""
    return any(
        CHECKPOINT.fullmatch(folder.name) and (folder / file).is_file()
        for folder in first_folders(path, 2)
    )


def checkpoints_in(path: Path, file: str) -> Iterator[tuple[str, str]]:
    """Yields every run in a folder with each of its `checkpoint_*` folders, which need a file."""
    for run in folders_in(path):
        folders = [name for name in folders_in(path / run) if CHECKPOINT.fullmatch(name)]
        if not folders:
            raise ConversionError(
                f"Expected folders checkpoint_* in every run (got none in '{path / run}')"
            )
        for folder in folders:
            if not (path / run / folder / file).is_file():
                raise FileNotFoundError(
                    f"Expected '{file}' in '{path / run / folder}' (got no such file)"
                )
            yield run, folder


def only_file(folder: Path, suffix: str) -> str:
    """Returns the name of the only file in a folder with a suffix."""
    names = files_in(folder, suffix) if folder.is_dir() else []
    if len(names) != 1:
        raise ConversionError(
            f"Expected one file *{suffix} in '{folder}' (got {', '.join(names) or 'none'})"
        )
    return names[0]
