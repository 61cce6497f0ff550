"""The folder of a store: `store.json`, which records its format, and the locks of its writers.

A lock is released when the process that holds it ends.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files.atomic import replacing
from nfn_graph.converters.store.architecture import FOLDER
from nfn_graph.converters.store.shards import METADATA, SEAL, SHARDS, WEIGHTS, seal_of
from nfn_graph.messages import UserError

try:
    import fcntl
except ImportError:  # Not available on this system.
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_writer(path: Path, what: str) -> Iterator[bool]:
    """Raises an error if another process holds the lock of a file.

    Args:
        path: The lock file, which is created and kept.
        what: What is written, for the error.

    Yields:
        Whether locks are supported here. If not, another process may be writing too.
    """
    with _locked(path, shared=False, wait=False) as found:
        if found is None:
            raise UserError(
                f"Expected no other process that writes {what} (got one that does). Wait for it, "
                f"or divide the work between both with --shard 1/2 and --shard 2/2."
            )
        yield found


@contextmanager
def publishing(folder: Path) -> Iterator[None]:
    """Holds a shared lock while the files of a shard are written."""
    with _locked(folder / "publish.lock", shared=True):
        yield


@contextmanager
def none_publishing(folder: Path) -> Iterator[None]:
    """Holds a lock while no process writes a shard, not even one whose parent was just killed."""
    with _locked(folder / "publish.lock", shared=False):
        yield


@contextmanager
def _locked(path: Path, *, shared: bool, wait: bool = True) -> Iterator[bool | None]:
    """Yields whether locks are supported; None if another process holds it and `wait` is false."""
    if fcntl is None:
        yield False
        return
    flags = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    with open(path, "ab") as file:
        works: bool | None = True
        try:
            fcntl.flock(file, flags)
        except BlockingIOError:
            works = None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            works = False  # The file system does not support locks.
        yield works


FILE = "store.json"
VERSION = 2
_FORMAT = "nfn-graph store"
# The file of zoos before version 2.
_OLD = "zoo.json"
_FOLDERS = (FOLDER, WEIGHTS, METADATA, SHARDS)


def is_store(folder: Path) -> bool:
    """Whether a folder has the description file of a store."""
    return (folder / FILE).is_file()


def create(folder: Path, description: Mapping[str, Any]) -> None:
    """Creates an empty store in a new or empty folder."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"Expected a folder to write to (got '{folder}', a file)")
    if (folder / _OLD).is_file():
        read_description(folder)
    # A writer may have been killed after creating the folders and before the description.
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
    """Reads `store.json`, and raises if this version of the package cannot read the store."""
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
    """Returns a description without its checksum, and raises if the checksum is wrong."""
    seal = found.pop(SEAL)
    if seal != seal_of(found):
        raise UserError(f"the checksum {seal}, which does not match the content")
    if not isinstance(found.get("key", ""), str):
        raise TypeError(f"the key {found['key']}, which is not the name of a column")
    return found
