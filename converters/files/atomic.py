"""Files that are either written completely or not at all."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which replaces `path` if the block succeeds.

    The temporary file is in the same folder, so the last step is a rename. Its data is on the disk
    before that. A mapping of the old file keeps the old content.
    """
    if not path.parent.is_dir() or path.is_dir():
        got = "a folder" if path.is_dir() else f"no folder '{path.parent}'"
        kind = IsADirectoryError if path.is_dir() else FileNotFoundError
        raise kind(f"Expected a file in a folder that exists to write '{path}' (got {got})")
    # The suffix stays because some writers choose the format by it. Names have a limited length.
    temporary = path.with_name(f".{path.stem[:40]}.{secrets.token_hex(8)}{path.suffix}")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        mode = temporary.stat().st_mode
        yield temporary
        # The writer may have replaced the file.
        temporary.chmod(mode)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        if not _is_full(path.parent, error):
            raise
        full = OSError(
            f"Expected enough space on the disk to write '{path}' (got a full disk). Free some "
            f"space, or choose another folder. The previous file is unchanged."
        )
        full.errno = errno.ENOSPC
        raise full from error
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _is_full(folder: Path, error: Exception) -> bool:
    """Whether a writer failed because the disk is full, whatever its library reports."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    # The partial file still takes up the rest of the space.
    return "No space left" in str(error) or shutil.disk_usage(folder).free == 0


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
