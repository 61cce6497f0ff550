"""`store.json`: which format a folder has, and what is in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.store.architecture import FOLDER
from nfn_graph.converters.store.shards import METADATA, SEAL, SHARDS, WEIGHTS, seal_of
from nfn_graph.messages import UserError

FILE = "store.json"
VERSION = 2
_FORMAT = "nfn-graph store"
# What zoos had before version 2.
_OLD = "zoo.json"
_FOLDERS = (FOLDER, WEIGHTS, METADATA, SHARDS)


def is_store(folder: Path) -> bool:
    """Whether a folder says that it is a store."""
    return (folder / FILE).is_file()


def create(folder: Path, description: Mapping[str, Any]) -> None:
    """Makes an empty store in a new or empty folder."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"Expected a folder to write to (got '{folder}', a file)")
    if (folder / _OLD).is_file():
        read_description(folder)
    # A writer may have been killed between the folders and the description.
    others = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    strange = [n for n in others if n not in _FOLDERS and not n.startswith(f".{Path(FILE).stem}.")]
    if strange or any(any((folder / part).glob("*")) for part in _FOLDERS):
        raise UserError(
            f"Expected a new or empty folder, or a store with its file '{FILE}' (got "
            f"'{folder}', which holds {(strange or others)[:3]}). Choose another one."
        )
    for part in _FOLDERS:
        (folder / part).mkdir(parents=True, exist_ok=True)
    document = {"format": _FORMAT, "version": VERSION, **description}
    with replacing(folder / FILE) as temporary:
        sealed = {**document, SEAL: seal_of(document)}
        temporary.write_text(json.dumps(sealed, indent=2) + "\n", "utf-8")


def read_description(folder: Path) -> dict[str, Any]:
    """What `store.json` says, if this version of the package can read the store."""
    path = folder / FILE
    if not path.is_file() and (folder / _OLD).is_file():
        raise UserError(
            f"Expected version {VERSION} of the format in '{folder}' (got version 1, which has "
            f"'{_OLD}'). Build the zoo again."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected a store, a folder with a file '{FILE}' (got '{folder}'). Make one with: "
            f"nfn-graph convert FILE ... --out {folder}, or nfn-graph zoo"
        )
    try:
        found = json.loads(path.read_text("utf-8"))
        format_, version = found["format"], found["version"]
        if format_ == _FORMAT and version == VERSION:
            return _unsealed(found)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConversionError(
            f"Expected the description of a store in '{path}' (got {type(error).__name__}: "
            f"{error}). The file is damaged: restore it, or build or convert into a new folder."
        ) from error
    raise UserError(
        f"Expected version {VERSION} of '{_FORMAT}' in '{path}' (got version {version} of "
        f"'{format_}'). Use the version of nfn-graph that wrote it."
    )


def _unsealed(found: dict[str, Any]) -> dict[str, Any]:
    """What a description says without its checksum, with which it agrees."""
    seal = found.pop(SEAL)
    if seal != seal_of(found):
        raise UserError(f"the checksum {seal} of something else")
    if not isinstance(found.get("key", ""), str):
        raise TypeError(f"the key {found['key']}, which is no name of a column")
    return found
