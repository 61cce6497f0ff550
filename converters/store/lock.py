"""Locks between the processes that write to a store; they end with the process that holds one."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nfn_graph.messages import UserError

try:
    import fcntl
except ImportError:  # not on this system
    fcntl = None  # type: ignore[assignment]


@contextmanager
def only_writer(path: Path, what: str) -> Iterator[bool]:
    """Refuses to go on while another process holds the lock of a file.

    Args:
        path: The file, which is made and stays.
        what: What is written, for the error.

    Yields:
        Whether locks work here: if not, another process may be writing too.
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
    """While files of a shard are written, which count only when all of them are there."""
    with _locked(folder / "publish.lock", shared=True):
        yield


@contextmanager
def none_publishing(folder: Path) -> Iterator[None]:
    """When no process is in the middle of a shard: also none whose parent was killed just now."""
    with _locked(folder / "publish.lock", shared=False):
        yield


@contextmanager
def _locked(path: Path, *, shared: bool, wait: bool = True) -> Iterator[bool | None]:
    """Yields whether locks work here; None if another process holds it and we do not wait."""
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
            works = False  # a file system without locks
        yield works
