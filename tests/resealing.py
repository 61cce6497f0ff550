"""Stores with damage that checksums do not reveal, because all of them were computed again."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nfn_graph.converters.store.shards import METADATA, SEAL, SHARDS, WEIGHTS, checksum, seal_of

Change = Callable[[dict[str, Any]], Any]
_WILD = (None, True, -1, 0, 1, 2**31, 2**63, 1e300, float("nan"), "", "x", "../x", [], {}, [[]])


def reseal(folder: Path) -> None:
    """Names every architecture by its content, and computes the checksums of all files again."""
    renamed: dict[str, str] = {}
    for path in (folder / "architectures").glob("*.json"):
        new = hashlib.sha256(path.read_bytes()).hexdigest()[:24]
        if new != path.stem:
            renamed[path.stem] = new
            path.rename(path.with_stem(new))
    for record in (folder / SHARDS).glob("*.json"):
        files = {
            WEIGHTS: folder / WEIGHTS / f"{record.stem}.safetensors",
            METADATA: folder / METADATA / f"{record.stem}.parquet",
        }
        for path in (record, files[WEIGHTS]):
            content = path.read_bytes()
            for old, new in renamed.items():
                content = content.replace(old.encode(), new.encode())
            path.write_bytes(content)
        if renamed:
            _rename_column(files[METADATA], renamed)
        try:
            document = json.loads(record.read_text("utf-8"))
            for name, path in files.items():
                document["sizes"][name] = path.stat().st_size
                document["checksums"][name] = checksum(path)
            record.write_text(json.dumps(document), "utf-8")
        except (ValueError, LookupError, TypeError, RecursionError):
            pass  # The damaged file is such that it has no checksums.
        _seal(record)
    _seal(folder / "store.json")


def _rename_column(path: Path, renamed: dict[str, str]) -> None:
    try:
        table = pq.read_table(pa.BufferReader(path.read_bytes()))
        names = table.column("architecture").to_pylist()
    except (pa.ArrowException, OSError, KeyError, UnicodeDecodeError):
        return
    column = pa.array(
        [renamed.get(name, name) if isinstance(name, str) else name for name in names]
    )
    at = table.column_names.index("architecture")
    pq.write_table(table.set_column(at, "architecture", column), path)


def _seal(path: Path) -> None:
    try:
        document = json.loads(path.read_text("utf-8"))
        document.pop(SEAL, None)
        path.write_text(json.dumps({**document, SEAL: seal_of(document)}), "utf-8")
    except (ValueError, AttributeError, TypeError, RecursionError):
        pass  # It is not an object any more.


def edit_record(
    folder: Path, change: Callable[[dict[str, Any]], Any], shard: str = "00000"
) -> None:
    """Changes the record of a shard; call `reseal` afterwards."""
    edit_json(folder / SHARDS / f"{shard}.json", change)


def edit_json(path: Path, change: Change) -> None:
    """Changes a JSON file."""
    document = json.loads(path.read_text("utf-8"))
    change(document)
    path.write_text(json.dumps(document), "utf-8")


def edit_table(folder: Path, change: Callable[[Any], Any], shard: str = "00000") -> None:
    """Replaces the table of a shard."""
    path = folder / METADATA / f"{shard}.parquet"
    pq.write_table(change(pq.read_table(pa.BufferReader(path.read_bytes()))), path)


def edit_header(
    folder: Path, change: Callable[[dict[str, Any]], Any], shard: str = "00000"
) -> None:
    """Changes the header of a shard's weights."""
    path = folder / WEIGHTS / f"{shard}.safetensors"
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def with_column(table: Any, name: str, values: Any) -> Any:
    """A table with other values in a column."""
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def forge(folder: Path, draw: random.Random) -> None:
    """Changes the contents of one file of a store in a way that its format allows."""
    shard = draw.choice(sorted(path.stem for path in (folder / SHARDS).glob("*.json")))
    match draw.randrange(6):
        case 0:
            edit_json(folder / "store.json", lambda d: _change_value(d, draw))
        case 1:
            edit_record(folder, lambda d: _change_value(d, draw), shard)
        case 2 | 3:
            paths = sorted((folder / "architectures").glob("*.json"))
            edit_json(draw.choice(paths), lambda d: _change_value(d, draw))
        case 4:
            edit_header(folder, lambda d: _change_value(d, draw), shard)
        case _:
            edit_table(folder, lambda table: _changed_table(table, draw), shard)


def _change_value(document: Any, draw: random.Random) -> None:
    """Replaces, deletes, doubles or exchanges a value somewhere in JSON."""
    places = [(holder, key) for holder, key in _places(document) if key != SEAL]
    holder, key = draw.choice(places)
    match draw.randrange(5):
        case 0 | 1:
            holder[key] = copy.deepcopy(draw.choice(_WILD))
        case 2:
            del holder[key]
        case 3:
            other, at = draw.choice(places)
            holder[key] = copy.deepcopy(other[at])
        case _:
            if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            else:
                holder[draw.choice(("x", "", "0/1", "store/graph/y"))] = holder.pop(key)


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in keys]
    return found + [
        p for key in keys if isinstance(value[key], dict | list) for p in _places(value[key])
    ]


def _changed_table(table: Any, draw: random.Random) -> Any:
    at = draw.randrange(table.num_columns)
    name, values = table.column_names[at], table.column(at).to_pylist()
    row = draw.randrange(len(values))
    match draw.randrange(8):
        case 0:
            return table.drop_columns([name])
        case 1:
            return table.append_column(name, table.column(at))
        case 2:
            return table.take(draw.sample(range(len(values)), len(values)))
        case 3:
            return table.take([draw.randrange(len(values)) for _ in values])
        case 4:
            return with_column(table, name, draw.choice(_COLUMNS)(len(values)))
        case 5:
            return table.rename_columns([n if n != name else "other" for n in table.column_names])
        case 6 if name == "notes":
            values[row] = json.dumps(draw.choice((*_WILD, *_NOTES)))
        case _:
            wild = [v for v in _WILD if type(v) is type(values[row])] or [None]
            values[row] = draw.choice(wild)
    try:
        return with_column(table, name, values)
    except (pa.ArrowException, OverflowError):
        return table.drop_columns([name])


# Other values that notes may have.
_NOTES = (
    [[{}], {}],
    [[{"note": 1}], {}],
    [[], {"hidden1/x": 5}],
    [[], {"graph/layout": 5}],
    [[], {"nobody/x": [1]}],
    [[], {"a/b/c/d/e": 1}],
    [[], {"graph/y": {"tuple": 3}}],
    [[], {"graph/y": {"bytes": "xyz"}}],
)
# Columns of other types.
_COLUMNS: tuple[Callable[[int], Any], ...] = (
    lambda n: [None] * n,
    lambda n: [float(i) for i in range(n)],
    lambda n: [str(i) for i in range(n)],
    lambda n: [[i] for i in range(n)],
    lambda n: [{"a": i} for i in range(n)],
    lambda n: [True] * n,
    lambda n: pa.array([2**62] * n, pa.timestamp("us")),
    lambda n: pa.array(range(n), pa.int8()),
)
