"""Shards: what was published, with the checksum of every file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.files.checks import check_regular
from nfn_graph.converters.store.table import arrow, parquet
from nfn_graph.messages import UserError, one_line

SHARDS, WEIGHTS, METADATA = "shards", "weights", "metadata"
_SUFFIXES = {WEIGHTS: "safetensors", METADATA: "parquet", SHARDS: "json"}
# Columns that lead from a row of the table to its network.
PLACE = ("shard", "architecture", "row", "notes")
# Where a record has its own checksum.
SEAL = "sha256"
_CHUNK = 2**20
_ARCHITECTURE = re.compile("[0-9a-f]{24}")


class Damage(NamedTuple):
    """A file that is not as it was written, and what is there instead."""

    path: Path
    got: str


class StoreDamageError(ConversionError):
    """A store with a file that is not as it was written, which `damage` names."""

    damage: Damage


@dataclass(frozen=True)
class Shard:
    """A published shard.

    Args:
        name: Its name, which its files have.
        networks: How many networks it holds.
        architectures: Their architectures.
        sizes: Bytes of its files, by folder.
        checksums: SHA-256 of its files, by folder.
    """

    name: str
    networks: int
    architectures: tuple[str, ...]
    sizes: dict[str, int]
    checksums: dict[str, str]


def file_of(folder: Path, part: str, name: str) -> Path:
    """A file of a shard: its weights, its metadata or its record of publication."""
    return folder / part / f"{name}.{_SUFFIXES[part]}"


def publish(folder: Path, name: str, networks: int, architectures: tuple[str, ...]) -> Shard:
    """Makes a shard count whose files are written: the last step, which is atomic."""
    paths = {part: file_of(folder, part, name) for part in (WEIGHTS, METADATA)}
    sizes = {part: path.stat().st_size for part, path in paths.items()}
    checksums = {part: checksum(path) for part, path in paths.items()}
    shard = Shard(name, networks, architectures, sizes, checksums)
    record = {key: value for key, value in vars(shard).items() if key != "name"}
    with replacing(file_of(folder, SHARDS, name)) as temporary:
        temporary.write_text(json.dumps({**record, SEAL: seal_of(record)}), "utf-8")
    return shard


def list_shards(folder: Path) -> list[str]:
    """The names of the published shards, in order."""
    found = (folder / SHARDS).glob("*.json")
    return sorted(path.stem for path in found if not path.name.startswith("."))


def read_shards(folder: Path) -> list[tuple[Shard, Any]]:
    """All published shards with their tables.

    One that is deleted meanwhile, since all its networks were converted again, is no damage.
    """
    while True:
        names = list_shards(folder)
        try:
            shards = [read_shard(folder, name) for name in names]
            return [(shard, read_table(folder, shard)) for shard in shards]
        except (ConversionError, FileNotFoundError):
            if set(names) <= set(list_shards(folder)):
                raise


def read_shard(folder: Path, name: str) -> Shard:
    """The record of a shard, whose files are there and as long as it says."""
    shard = read_record(folder, name)
    for part in (WEIGHTS, METADATA):
        got = _wrong_size(folder, shard, part)
        if got is not None:
            raise damaged(file_of(folder, part, name), got)
    return shard


def read_record(folder: Path, name: str) -> Shard:
    """The record of a shard."""
    path = file_of(folder, SHARDS, name)
    try:
        record = json.loads(check_regular(path).read_text("utf-8"))
        seal = record.pop(SEAL)
        if seal != seal_of(record):
            raise UserError(f"the checksum {seal} of something else")
        _check_record(record)
        return Shard(name, **{**record, "architectures": tuple(record["architectures"])})
    except FileNotFoundError:
        raise
    except Exception as error:  # whatever a damaged record leads to
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _check_record(record: Mapping[str, Any]) -> None:
    """Raises unless a record can have been written; a checksum does not say by whom."""
    networks, names = record["networks"], record["architectures"]
    sizes, checksums = record["sizes"], record["checksums"]
    is_right = (
        isinstance(names, list)
        and all(map(_ARCHITECTURE.fullmatch, names))
        and {part: type(size) for part, size in sizes.items()} == {WEIGHTS: int, METADATA: int}
        and {part: type(sum_) for part, sum_ in checksums.items()} == {WEIGHTS: str, METADATA: str}
        # Every network has a tensor, so that a shard has no more of them than bytes.
        and type(networks) is int
        and 0 < networks <= sizes[WEIGHTS]
    )
    if not is_right:
        raise UserError(f"a record that says {str(record)[:200]}")


def _wrong_size(folder: Path, shard: Shard, part: str) -> str | None:
    """What is there instead of a file of the size that was written; None if it is right."""
    file = file_of(folder, part, shard.name)
    size = file.stat().st_size if file.is_file() else None
    if size == shard.sizes[part]:
        return None
    got = "none" if size is None else f"one of {size} bytes"
    return f"{got}, instead of {shard.sizes[part]} bytes"


def read_table(folder: Path, shard: Shard) -> Any:
    """The rows of a shard, as a `pyarrow.Table`."""
    path = file_of(folder, METADATA, shard.name)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != shard.checksums[METADATA]:
        raise damaged(path, "another content")
    library, buffer = parquet(), arrow().BufferReader(content)
    try:
        rows = library.read_metadata(buffer).num_rows
        if rows != shard.networks:
            raise UserError(f"{rows} rows instead of {shard.networks}")
        table = library.read_table(buffer)
        table.validate(full=True)
        _check_places(table, shard)
    except Exception as error:  # whatever a damaged table leads to
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    return table


def _check_places(table: Any, shard: Shard) -> None:
    """Raises unless every row leads to a network of its own.

    Networks of one architecture lie one after another, in the order of their rows.
    """
    schema = table.schema
    if len(set(schema.names)) < len(schema) or not set(PLACE) <= set(schema.names):
        raise UserError(f"the columns {schema.names}")
    text = arrow().string()
    types = [schema.field(name).type for name in PLACE]
    if types != [text, text, arrow().int64(), text]:
        raise UserError(f"the columns {', '.join(PLACE)} of the types {', '.join(map(str, types))}")
    shards, names, rows, _ = (table.column(name).combine_chunks() for name in PLACE)
    if shards.unique().to_pylist() != [shard.name]:
        raise UserError(f"networks of the shards {shards.unique().to_pylist()[:5]}")
    if sorted(map(str, names.unique().to_pylist())) != sorted(shard.architectures):
        raise UserError(f"networks of the architectures {names.unique().to_pylist()[:5]}")
    which = names.dictionary_encode().indices.to_numpy()
    order, counts = np.argsort(which, kind="stable"), np.bincount(which)
    expected = np.arange(len(which)) - np.repeat(counts.cumsum() - counts, counts)
    found = rows.to_numpy(zero_copy_only=False)[order]
    if not np.array_equal(found, expected):
        wrong = np.flatnonzero(found != expected)[0]
        raise UserError(f"row {found[wrong]} of an architecture instead of {expected[wrong]}")


def wrong_files(folder: Path, shard: Shard) -> Iterator[tuple[Path, str]]:
    """The files of a shard that are not as they were written, and what is there instead."""
    for part in (WEIGHTS, METADATA):
        path = file_of(folder, part, shard.name)
        got = _wrong_size(folder, shard, part)
        if got is None and checksum(path) != shard.checksums[part]:
            got = "another content"
        if got is not None:
            yield path, got


def remove_shard(folder: Path, name: str) -> None:
    """Deletes a shard; it stops counting first."""
    for part in (SHARDS, METADATA, WEIGHTS):
        file_of(folder, part, name).unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def damaged(path: Path, got: str) -> StoreDamageError:
    """The error for a file of a shard that is not as it was published."""
    return damage_error(
        path,
        got,
        f"delete '{SHARDS}/{path.stem}.json' in it, and build or convert again what is missing",
    )


def damage_error(path: Path, got: str, advice: str) -> StoreDamageError:
    """The error for any file of a store that is not as it was written."""
    damage = Damage(path, one_line(got))
    error = StoreDamageError(
        f"Expected '{path}' as it was written (got {damage.got}). The store is damaged: {advice}."
    )
    error.damage = damage
    return error


def seal_of(record: Mapping[str, Any]) -> str:
    """A checksum of a record itself."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
