"""Reads labels of networks: a table with one row per file, in CSV, Parquet or JSON lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from nfn_graph.converters.conversion.sharding import KEPT
from nfn_graph.converters.errors import require
from nfn_graph.converters.files.checks import check_regular
from nfn_graph.converters.store.shards import PLACE
from nfn_graph.converters.store.table import COLUMN as SPLIT
from nfn_graph.converters.store.table import (
    DEFAULT_SHARES,
    SPLITS,
    arrow,
    check_shares,
    compute,
    parquet,
)
from nfn_graph.messages import UserError, one_line

_SYNONYMS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}
# The columns that every store of converted files has.
RESERVED = (*KEPT, *PLACE)
Values = tuple[Any, ...]


class Fractions(NamedTuple):
    """The shares of the splits, for tables without a column `split`.

    Attributes:
        given: The shares of train, validation and test, if the user gave them.
        seed: The seed of the random split.
    """

    given: tuple[float, float, float] | None = None
    seed: int = 0

    @property
    def parts(self) -> tuple[float, float, float]:
        """The shares of train, validation and test."""
        return DEFAULT_SHARES if self.given is None else self.given

    def check(self) -> None:
        """Raises unless the shares are valid and the seed is not negative."""
        check_shares(self.parts)
        if self.seed < 0:
            raise UserError(f"Expected a --seed of at least 0 (got {self.seed})")

    def __str__(self) -> str:
        return " ".join(f"{part:g}" for part in self.parts)

    def counts(self, total: int) -> list[int]:
        """Returns the number of networks in each split; splits with a share are never empty."""
        wanted = [i for i, part in enumerate(self.parts) if part]
        if total < len(wanted):
            raise UserError(
                f"Expected at least one labelled file for each of "
                f"{', '.join(SPLITS[i] for i in wanted)} (got {total} in all). Pass more files, or "
                f"other shares with --split."
            )
        counts = [max(1, int(part * total + 1e-9)) if part else 0 for part in self.parts]
        # The remainder of the rounding goes to the splits that are furthest below their shares.
        while (left := total - sum(counts)) != 0:
            step = 1 if left > 0 else -1
            gaps = {i: step * (self.parts[i] * total - counts[i]) for i in wanted}
            counts[max((i for i in wanted if counts[i] + step > 0), key=lambda i: gaps[i])] += step
        return counts


@dataclass(frozen=True)
class Labels:
    """Labels of files.

    Args:
        table: A `pyarrow.Table`: one column names the files, the others are labels.
        name: The name of the table in messages.
        fractions: The shares of the splits if the table has no column `split`.
        file_column: The column that names the files; if None, it is found by comparing the columns
            with the files.
        folder: The folder to which relative names with `..` refer.
        is_text: Whether all cells are text, which may contain numbers.
    """

    table: Any
    name: str
    fractions: Fractions
    file_column: str | None = None
    folder: Path = Path()
    is_text: bool = False

    def __post_init__(self) -> None:
        names = self.table.column_names
        double = next((name for name in names if names.count(name) > 1 or not name), None)
        if double is not None:
            raise UserError(f"Expected columns with different names in {self.name} (got {names})")
        if not self.table.num_rows:
            raise UserError(f"Expected a row for each file in {self.name} (got none)")
        if self.file_column not in (None, *names):
            raise UserError(
                f"Expected a column of {self.name} as --file-column: {', '.join(names)} (got "
                f"'{self.file_column}')"
            )
        if self.fractions.given is not None and SPLIT in names:
            raise UserError(
                f"Expected no --split, because {self.name} has a column '{SPLIT}' (got "
                f"{self.fractions})"
            )
        self.fractions.check()

    def match(self, files: Sequence[tuple[str, str]]) -> Matched:
        """Finds the row that belongs to each file."""
        index = _FileIndex(files, self.folder)
        column, found = self._named(index)
        rows: dict[int, int] = {}
        unused = []
        cells = self.table.column(column).cast(arrow().string()).to_pylist()
        for number, file in enumerate(found):
            if file is None:
                unused.append(f"row {number + 1} ({cells[number]})")
            elif file in rows:
                raise UserError(
                    f"Expected one row for each file in {self.name} (got rows {rows[file] + 1} and "
                    f"{number + 1} for '{files[file][0]}')"
                )
            else:
                rows[file] = number
        labels = self.table.drop_columns([column])
        reserved = [name for name in RESERVED if name in labels.column_names]
        if reserved:
            raise UserError(
                f"Expected columns other than {', '.join(RESERVED)} in {self.name}, because stores "
                f"use these names (got '{reserved[0]}'). Rename it."
            )
        columns = {name: self._values(name) for name in labels.column_names}
        if SPLIT not in columns:
            self.fractions.counts(len(rows))
            columns[SPLIT] = arrow().nulls(self.table.num_rows, arrow().string())
        types = {name: values.type for name, values in columns.items()}
        lists = [values.to_pylist() for values in columns.values()]
        at = [rows.get(file) for file in range(len(files))]
        values = [None if row is None else tuple(cells[row] for cells in lists) for row in at]
        return Matched(self, types, values, unused)

    def _named(self, index: _FileIndex) -> tuple[str, list[int | None]]:
        """Returns the column that names files, and the file that each row names."""
        names = self.table.column_names if self.file_column is None else [self.file_column]
        found: dict[str, list[int | None]] = {}
        for name in names:
            values = self.table.column(name)
            types = arrow().types
            if types.is_string(values.type) or types.is_integer(values.type):
                cells = values.cast(arrow().string()).to_pylist()
                found[name] = index.find(cells, self.name if self.file_column else None)
        scores = {
            name: len({at for at in files if at is not None}) for name, files in found.items()
        }
        best = max(scores.values(), default=0)
        if not best:
            example = self.table.column(names[0])[0].as_py()
            raise UserError(
                f"Expected a column of {self.name} that names the files, such as "
                f"'{index.names[0]}' (got {', '.join(names)}; the first value is {example!r}). "
                f"Write their names into a column, or name it with --file-column."
            )
        chosen = [name for name, score in scores.items() if score == best]
        if len(chosen) > 1:
            raise UserError(
                f"Expected one column of {self.name} that names the files (got "
                f"{', '.join(chosen)}). Choose one with --file-column."
            )
        column = chosen[0]
        # Searched again, to refuse names that match several files.
        cells = self.table.column(column).cast(arrow().string()).to_pylist()
        return column, index.find(cells, self.name)

    def _values(self, name: str) -> Any:
        """Returns a column as it is stored: numbers, booleans or text, with a null for NaN."""
        values, types = self.table.column(name).combine_chunks(), arrow().types
        if types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if types.is_large_string(values.type):
            values = values.cast(arrow().string())
        if name == SPLIT:
            return arrow().array(map(self._split, values.to_pylist(), range(len(values))))
        if self.is_text:
            values = _typed(values)
        if types.is_floating(values.type):
            return compute().if_else(compute().is_nan(values), None, values)
        known = (types.is_boolean, types.is_integer, types.is_string, types.is_temporal)
        if not any(is_kind(values.type) for is_kind in (*known, types.is_null)):
            raise UserError(
                f"Expected numbers, booleans or text in column '{name}' of {self.name} (got "
                f"{values.type})"
            )
        return values

    def _split(self, value: Any, row: int) -> str:
        split = _SYNONYMS.get(value.strip().lower()) if isinstance(value, str) else None
        if split is None:
            raise UserError(
                f"Expected {', '.join(SPLITS)} in column '{SPLIT}' of {self.name} (got {value!r} "
                f"in row {row + 1})"
            )
        return split


@dataclass(frozen=True)
class Matched:
    """The labels of every file.

    Attributes:
        labels: The table that they come from.
        types: The Arrow types of the columns of labels, one of which is the split.
        values: The labels of every file, in the order of the columns; None for a file without a
            row.
        unused: The rows that belong to no file.
    """

    labels: Labels
    types: Mapping[str, Any]
    values: Sequence[Values | None]
    unused: Sequence[str]

    def divided(self, names: Sequence[str], kept: Mapping[str, str]) -> list[Values | None]:
        """Returns the labels of every file, including its split.

        The order in which networks are assigned to splits depends only on the seed and on their
        names, so all machines assign them in the same way.

        Args:
            names: The names of all networks.
            kept: The splits that networks already have, which they keep.
        """
        if SPLIT in self.labels.table.column_names:
            return list(self.values)
        fractions = self.labels.fractions
        labelled = {n for n, v in zip(names, self.values, strict=True) if v is not None}
        counts = fractions.counts(len(labelled | set(kept)))
        for split in kept.values():
            counts[SPLITS.index(split)] -= 1
        order = sorted(
            labelled - set(kept),
            key=lambda name: hashlib.blake2b(f"{fractions.seed}/{name}".encode()).digest(),
        )
        quotas = [split for split, n in zip(SPLITS, counts, strict=True) for _ in range(n)]
        splits = {**kept, **dict(zip(order, quotas, strict=False))}
        at = list(self.types).index(SPLIT)
        return [
            None if v is None else (*v[:at], splits[name], *v[at + 1 :])
            for name, v in zip(names, self.values, strict=True)
        ]


class _FileIndex:
    """Files by the names that rows may use for them.

    A row names a file by its path, by the end of its path (`b/model.pt`, `model.pt`), or by either
    without the suffix.
    """

    def __init__(self, files: Sequence[tuple[str, str]], folder: Path) -> None:
        self.names = [name for name, _ in files]
        self.folder = folder
        self._paths = [PurePosixPath(Path(path).as_posix()) for _, path in files]
        self._exact = {name: i for i, name in enumerate(self.names)}
        self._by_depth: dict[int, dict[str, list[int]]] = {}

    def find(self, cells: Sequence[str | None], table: str | None) -> list[int | None]:
        """Returns the file that every cell names, or None.

        Args:
            cells: The names.
            table: The name of the table in errors about names that match several files; if None,
                such a name matches no file.
        """
        return [None if cell is None else self._one(cell, table) for cell in cells]

    def _one(self, cell: str, table: str | None) -> int | None:
        text = cell.strip().replace("\\", "/").removeprefix("./")
        if ".." in text.split("/"):
            text = (self.folder / text).resolve().as_posix()
        if not text.strip("/"):
            return None
        if text in self._exact:
            return self._exact[text]
        found = self._ends(text.strip("/").count("/") + 1).get(text.strip("/"), [])
        if len(found) > 1 and table is not None:
            raise UserError(
                f"Expected names in {table} that belong to one file each (got '{cell}' for "
                f"'{self.names[found[0]]}' and '{self.names[found[1]]}'). Write longer paths."
            )
        return found[0] if len(found) == 1 else None

    def _ends(self, depth: int) -> dict[str, list[int]]:
        """Returns the files by the last parts of their paths, with and without suffix."""
        if depth not in self._by_depth:
            ends: dict[str, list[int]] = {}
            for i, path in enumerate(self._paths):
                parts = [part for part in path.parts if part != "/"]
                end = "/".join(parts[-depth:])
                stem = end.removesuffix(path.suffix)
                for name in {end, stem} if len(parts) >= depth else ():
                    ends.setdefault(name, []).append(i)
            self._by_depth[depth] = ends
        return self._by_depth[depth]


def read_labels(path: Path, file_column: str | None, fractions: Fractions) -> Labels:
    """Reads the labels in a file; its suffix determines the format."""
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"Expected a file of labels: {', '.join(READERS)} (got '{path}')")
    check_regular(path)
    try:
        table = reader(path)
    except (arrow().ArrowException, ValueError) as error:
        raise UserError(
            f"Expected a table of labels in '{path}' (got: {one_line(error)})"
        ) from error
    is_text = reader is _read_csv
    return Labels(table, f"'{path}'", fractions, file_column, path.absolute().parent, is_text)


def labels_of(rows: Sequence[Mapping[str, Any]], name: str, fractions: Fractions) -> Labels:
    """Creates labels from dicts, in which the key `file` names the files."""
    return Labels(_table(rows), name, fractions, "file")


def _read_csv(path: Path) -> Any:
    csv = require("pyarrow.csv", "to read labels")
    content = path.read_bytes()
    try:
        content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"text that is not UTF-8, at byte {error.start}. Save it as CSV in UTF-8"
        ) from error
    parsing = csv.ParseOptions(newlines_in_values=True)
    # Threads that read ahead may still run when a command ends with an error, and arrow then
    # aborts.
    reading = csv.ReadOptions(use_threads=False)
    opened = csv.open_csv(arrow().BufferReader(content), reading, parsing)
    names = opened.schema.names
    # Read as text, because names of files such as 0001 are not numbers.
    as_text = csv.ConvertOptions(
        column_types=dict.fromkeys(names, arrow().string()),
        null_values=[""],
        strings_can_be_null=True,
    )
    return csv.read_csv(arrow().BufferReader(content), reading, parsing, as_text)


def _read_lines(path: Path) -> Any:
    rows: list[dict[str, Any]] = []
    try:
        for number, line in enumerate(path.read_text("utf-8-sig").splitlines(), 1):
            row = json.loads(line) if line.strip() else {}
            if not isinstance(row, dict):
                raise UserError(f"{type(row).__name__} in line {number} instead of an object")
            rows += [row] if line.strip() else []
    except UnicodeDecodeError as error:
        raise UserError(f"text that is not UTF-8, at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"invalid JSON in line {number}: {error}") from error
    return _table(rows)


def _table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Creates a table from rows; keys that a row lacks become nulls."""
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if not isinstance(name, str):
            raise UserError(f"Expected text as names of labels (got {name!r})")
        try:
            columns[name] = arrow().array([row.get(name) for row in rows])
        except (arrow().ArrowException, ValueError, TypeError, OverflowError) as error:
            raise UserError(
                f"Expected values of one type for label '{name}' (got: {one_line(error)})"
            ) from error
    return arrow().table(columns)


READERS: dict[str, Callable[[Path], Any]] = {
    ".csv": _read_csv,
    ".parquet": lambda path: parquet().read_table(path),
    ".jsonl": _read_lines,
    ".ndjson": _read_lines,
}


def _typed(cells: Any) -> Any:
    """Casts text to integers, floats or booleans if all of it can be cast."""
    trimmed = compute().utf8_trim_whitespace(cells)
    for type_ in (arrow().int64(), arrow().float64(), arrow().bool_()):
        try:
            return trimmed.cast(type_)
        except arrow().ArrowInvalid:
            continue
    return cells
