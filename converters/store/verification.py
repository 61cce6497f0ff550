"""Whether a store is as it was written, file by file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.store.architecture import FOLDER, architecture_file
from nfn_graph.converters.store.description import FILE, read_description
from nfn_graph.converters.store.shards import (
    SHARDS,
    file_of,
    list_shards,
    read_record,
    wrong_files,
)


class Damage(NamedTuple):
    """A file that is not as it was written, and what is there instead."""

    path: Path
    got: str


def find_damage(folder: Path) -> Iterator[Damage]:
    """Reads everything; every damaged file of a store, whatever else is damaged."""
    try:
        read_description(folder)
    except ConversionError:
        yield Damage(folder / FILE, "another content")
    # Also those that only a damaged record names.
    architectures = {path.stem for path in (folder / FOLDER).glob("[!.]*.json")}
    for name in list_shards(folder):
        try:
            shard = read_record(folder, name)
        except FileNotFoundError:
            continue  # deleted meanwhile: its networks were converted again
        except ConversionError:
            yield Damage(file_of(folder, SHARDS, name), "another content")
            continue
        architectures.update(shard.architectures)
        for path, got in wrong_files(folder, shard):
            yield Damage(path, got)
    yield from wrong_architectures(folder, architectures)


def wrong_architectures(folder: Path, names: Iterable[str]) -> Iterator[Damage]:
    """The files of architectures that are missing, or not as they were written."""
    for path in (architecture_file(folder, name) for name in sorted(names)):
        if not path.is_file():
            yield Damage(path, "none")
        elif not hashlib.sha256(path.read_bytes()).hexdigest().startswith(path.stem):
            yield Damage(path, "another content")
