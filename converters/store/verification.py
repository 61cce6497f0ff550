"""Checks file by file whether a store is as it was written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.store.architecture import FOLDER, architecture_file
from nfn_graph.converters.store.description import FILE, read_description
from nfn_graph.converters.store.reader import Store
from nfn_graph.converters.store.shards import (
    METADATA,
    SHARDS,
    Damage,
    StoreDamageError,
    file_of,
    list_shards,
    read_record,
    wrong_files,
)
from nfn_graph.messages import one_line


def find_damage(folder: Path) -> Iterator[Damage]:
    """Reads everything and yields every damaged file of a store.

    Checksums are compared first. If all of them match, every file is also read as its users read
    it, because a checksum that was computed again matches any content.

    Example:
        >>> import pathlib, tempfile
        >>> from torch import nn
        >>> from nfn_graph.converters import build_store, from_module
        >>> from nfn_graph.converters.store import find_damage
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     networks = [(from_module(nn.Linear(2, 1)), {"seed": i}) for i in range(3)]
        ...     report = build_store(networks, f"{folder}/store")
        ...     print(list(find_damage(pathlib.Path(folder, "store"))))
        ...     weights = next(pathlib.Path(folder, "store", "weights").iterdir())
        ...     _ = weights.write_bytes(weights.read_bytes()[:-1])
        ...     print(len(list(find_damage(pathlib.Path(folder, "store")))))
        []
        1
    """
    changed = list(_changed(folder))
    yield from changed or _forged(folder)


def _changed(folder: Path) -> Iterator[Damage]:
    """Yields the files whose checksums do not match."""
    try:
        read_description(folder)
    except ConversionError:
        yield Damage(folder / FILE, "different content")
    # Includes architectures that only a damaged record names.
    architectures = {path.stem for path in (folder / FOLDER).glob("[!.]*.json")}
    for name in list_shards(folder):
        try:
            shard = read_record(folder, name)
        except FileNotFoundError:
            continue  # It was deleted meanwhile, because its networks were converted again.
        except ConversionError:
            yield Damage(file_of(folder, SHARDS, name), "different content")
            continue
        architectures.update(shard.architectures)
        for path, got in wrong_files(folder, shard):
            yield Damage(path, got)
    yield from wrong_architectures(folder, architectures)


def wrong_architectures(folder: Path, names: Iterable[str]) -> Iterator[Damage]:
    """Yields the files of architectures that are missing or not as they were written."""
    for path in (architecture_file(folder, name) for name in sorted(names)):
        if not path.is_file():
            yield Damage(path, "none")
        elif not hashlib.sha256(path.read_bytes()).hexdigest().startswith(path.stem):
            yield Damage(path, "different content")


def _forged(folder: Path) -> Iterator[Damage]:
    """Yields the files whose checksums match but whose content is impossible."""
    if not list_shards(folder):
        return
    try:
        store = Store(folder)
        _ = store.rows
    except ConversionError as error:
        yield _damage(error, folder)
        return
    # Networks of one architecture and shard differ only in their notes.
    places = np.stack([store.places.shard, store.places.architecture], 1)
    _, first = np.unique(places, axis=0, return_index=True)
    noted = np.flatnonzero(store.table.column("notes").is_valid().to_numpy())
    named: set[Path] = set()
    for position in np.union1d(first, noted).tolist():
        shard = store.shards[int(store.places.shard[position])]
        try:
            store.graph(position)
        except ConversionError as error:
            damage = _damage(error, file_of(folder, METADATA, shard.name))
            if damage.path not in named:
                yield damage
            named.add(damage.path)


def _damage(error: ConversionError, path: Path) -> Damage:
    """Returns the damage that an error describes; that of `path` if it names no file."""
    if isinstance(error, StoreDamageError):
        return error.damage
    return Damage(path, one_line(error))
