"""Shards: records of what was published, with the checksum of every file."""

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
# The columns that lead from a row of the table to its network.
PLACE = ("shard", "architecture", "row", "notes")
# The key of a record's own checksum.
SEAL = "sha256"
_CHUNK = 2**20
_ARCHITECTURE = re.compile("[0-9a-f]{24}")


class Damage(NamedTuple):
    """A file that is not as it was written, and what was found instead."""

    path: Path
    got: str


class StoreDamageError(ConversionError):
    """Raised for a store with a damaged file, which `damage` names."""

    damage: Damage


@dataclass(frozen=True)
class Shard:
    """A published shard.

    Args:
        name: Its name, which is also the name of its files.
        networks: The number of networks.
        architectures: The architectures of the networks.
        sizes: The sizes of its files in bytes, by folder.
        checksums: The SHA-256 checksums of its files, by folder.
    """

    name: str
    networks: int
    architectures: tuple[str, ...]
    sizes: dict[str, int]
    checksums: dict[str, str]


def file_of(folder: Path, part: str, name: str) -> Path:
    """Returns the path of a file of a shard: its weights, its metadata or its record."""
    return folder / part / f"{name}.{_SUFFIXES[part]}"


def publish(folder: Path, name: str, networks: int, architectures: tuple[str, ...]) -> Shard:
    """Publishes a shard whose files are written. This is the last step, and it is atomic."""
    paths = {part: file_of(folder, part, name) for part in (WEIGHTS, METADATA)}
    sizes = {part: path.stat().st_size for part, path in paths.items()}
    checksums = {part: checksum(path) for part, path in paths.items()}
    shard = Shard(name, networks, architectures, sizes, checksums)
    record = {key: value for key, value in vars(shard).items() if key != "name"}
    with replacing(file_of(folder, SHARDS, name)) as temporary:
        temporary.write_text(json.dumps({**record, SEAL: seal_of(record)}), "utf-8")
    return shard


def list_shards(folder: Path) -> list[str]:
    """Returns the names of the published shards, in order."""
    found = (folder / SHARDS).glob("*.json")
    return sorted(path.stem for path in found if not path.name.startswith("."))


def read_shards(folder: Path) -> list[tuple[Shard, Any]]:
    """Reads all published shards with their tables.

    A shard that is deleted meanwhile, because all its networks were converted again, is not an
    error.
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
    """Reads the record of a shard, and checks the existence and sizes of its files."""
    shard = read_record(folder, name)
    for part in (WEIGHTS, METADATA):
        got = _wrong_size(folder, shard, part)
        if got is not None:
            raise damaged(file_of(folder, part, name), got)
    return shard


def read_record(folder: Path, name: str) -> Shard:
    """Reads the record of a shard."""
    path = file_of(folder, SHARDS, name)
    try:
        record = json.loads(check_regular(path).read_text("utf-8"))
        seal = record.pop(SEAL)
        if seal != seal_of(record):
            raise UserError(f"the checksum {seal}, which does not match the content")
        _check_record(record)
        return Shard(name, **{**record, "architectures": tuple(record["architectures"])})
    except FileNotFoundError:
        raise
    except Exception as error:  # A damaged record may cause any error.
        raise damaged(path, f"{type(error).__name__}: {error}") from error


def _check_record(record: Mapping[str, Any]) -> None:
    """Raises for an impossible record, because a checksum does not prove who wrote it."""
    networks, names = record["networks"], record["architectures"]
    sizes, checksums = record["sizes"], record["checksums"]
    is_right = (
        isinstance(names, list)
        and all(map(_ARCHITECTURE.fullmatch, names))
        and {part: type(size) for part, size in sizes.items()} == {WEIGHTS: int, METADATA: int}
        and {part: type(sum_) for part, sum_ in checksums.items()} == {WEIGHTS: str, METADATA: str}
        # Every network has a tensor, so a shard cannot have more networks than bytes.
        and type(networks) is int
        and 0 < networks <= sizes[WEIGHTS]
    )
    if not is_right:
        raise UserError(f"the record {str(record)[:200]}")


def _wrong_size(folder: Path, shard: Shard, part: str) -> str | None:
    """Describes a file that is missing or has the wrong size; None if it is right."""
    file = file_of(folder, part, shard.name)
    size = file.stat().st_size if file.is_file() else None
    if size == shard.sizes[part]:
        return None
    got = "none" if size is None else f"one of {size} bytes"
    return f"{got}, instead of {shard.sizes[part]} bytes"


def read_table(folder: Path, shard: Shard) -> Any:
    """Reads the rows of a shard as a `pyarrow.Table`."""
    path = file_of(folder, METADATA, shard.name)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != shard.checksums[METADATA]:
        raise damaged(path, "different content")
    library, buffer = parquet(), arrow().BufferReader(content)
    try:
        rows = library.read_metadata(buffer).num_rows
        if rows != shard.networks:
            raise UserError(f"{rows} rows instead of {shard.networks}")
        table = library.read_table(buffer)
        table.validate(full=True)
        _check_places(table, shard)
    except Exception as error:  # A damaged table may cause any error.
        raise damaged(path, f"{type(error).__name__}: {error}") from error
    return table


def _check_places(table: Any, shard: Shard) -> None:
    """Raises unless every row leads to its own network.

    Networks of one architecture are stored one after another, in the order of their rows.
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
    """Yields the files of a shard that are not as they were written, and what was found instead."""
    for part in (WEIGHTS, METADATA):
        path = file_of(folder, part, shard.name)
        got = _wrong_size(folder, shard, part)
        if got is None and checksum(path) != shard.checksums[part]:
            got = "different content"
        if got is not None:
            yield path, got


def remove_shard(folder: Path, name: str) -> None:
    """Deletes a shard, starting with the record that makes it valid."""
    for part in (SHARDS, METADATA, WEIGHTS):
        file_of(folder, part, name).unlink(missing_ok=True)


def checksum(path: Path) -> str:
    """Returns the SHA-256 checksum of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def damaged(path: Path, got: str) -> StoreDamageError:
    """Returns the error for a file of a shard that is not as it was published."""
    return damage_error(
        path,
        got,
        f"delete '{SHARDS}/{path.stem}.json' in it, and build or convert again what is missing",
    )


def damage_error(path: Path, got: str, advice: str) -> StoreDamageError:
    """Returns the error for any file of a store that is not as it was written."""
    damage = Damage(path, one_line(got))
    error = StoreDamageError(
        f"Expected '{path}' as it was written (got {damage.got}). The store is damaged: {advice}."
    )
    error.damage = damage
    return error


def seal_of(record: Mapping[str, Any]) -> str:
    """Returns the checksum of a record."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
