"""Tables of comma-separated values, kept by column."""

from __future__ import annotations

import csv
import gzip
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.checks import check_regular
from nfn_graph.converters.zoos.zoo import Row

# Rows that are turned into columns at once.
_TOGETHER = 4096


class Table(Sequence[Row]):
    """Rows that are made when they are asked for: hundreds of thousands of dicts would not fit.

    Args:
        columns: The values of each column.
    """

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Table({name: values[index] for name, values in self.columns.items()})
        return {name: values[index] for name, values in self.columns.items()}


def read_table(path: Path, required: Sequence[str]) -> Table:
    """A table with a head line; a file that ends in `.gz` is unpacked on the way.

    Args:
        path: The file.
        required: Names of columns that must be there.
    """
    lines = _lines(path)
    names = next(lines, [])
    missing = [name for name in required if name not in names]
    if missing or len(set(names)) != len(names):
        raise ConversionError(
            f"Expected a head line with the columns {', '.join(required)}, each once, in '{path}' "
            f"(got {', '.join(names) or 'nothing'})"
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
    """Whole numbers, numbers or text: whatever all cells are; an empty cell is no number."""
    for kind in (int, float):
        try:
            return list(map(kind, cells))
        except ValueError:
            continue
    try:
        return [float(cell) if cell else None for cell in cells]
    except ValueError:
        return cells
