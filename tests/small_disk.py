"""A disk with little free space."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mounts a file system with a given number of bytes at a folder.

    If mounting is not allowed, writing fails as on network disks, which only report that they are
    full when data is synchronised.
    """
    folder.mkdir()
    if _mount(folder, size):
        try:
            yield folder
        finally:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    fsync = os.fsync

    def full(handle: int) -> None:
        if sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) > size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with patch.object(os, "fsync", full):
        yield folder


def is_mounted() -> bool:
    """Whether a small disk also limits other processes."""
    with TemporaryDirectory() as folder:
        if not _mount(Path(folder), 4096):
            return False
        subprocess.run(["umount", "-l", folder], check=True)
    return True


def _mount(folder: Path, size: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
