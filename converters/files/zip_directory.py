"""The directory of a zip archive, without what else `zipfile` does to open one."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nfn_graph.converters.errors import ConversionError

_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s4B4HL2L5H2L")
_IN_ZIP64 = 0xFFFFFFFF


class ZipEntry(NamedTuple):
    """What the directory says of a file in an archive."""

    filename: str
    compress_type: int
    compress_size: int
    file_size: int


def read_entries(path: Path) -> list[ZipEntry]:
    """The files in an archive, by its directory."""
    try:
        with open(path, "rb") as file:
            found = _read_plain(file)
        if found is None:
            with zipfile.ZipFile(path) as archive:
                found = [
                    ZipEntry(e.filename, e.compress_type, e.compress_size, e.file_size)
                    for e in archive.infolist()
                ]
    except Exception as error:  # zipfile raises many kinds on damaged archives
        raise ConversionError(
            f"Expected a complete zip archive in '{path}' (got one that cannot be read: {error}). "
            f"It is truncated or damaged."
        ) from error
    return found


def _read_plain(file: BinaryIO) -> list[ZipEntry] | None:
    """The entries of an archive without comments and large sizes; None for any other."""
    end = os.fstat(file.fileno()).st_size - _END.size
    if end < 0:
        return None
    file.seek(end)
    magic, disk, first_disk, _, count, size, offset, comment = _END.unpack(file.read(_END.size))
    if magic != b"PK\x05\x06" or disk or first_disk or comment or offset + size > end:
        return None
    file.seek(offset)
    directory = file.read(size)
    entries = []
    at = 0
    while at + _ENTRY.size <= size:
        fields = _ENTRY.unpack_from(directory, at)
        name_size, extra_size, comment_size = fields[12:15]
        compress_size, file_size, position = fields[10], fields[11], fields[-1]
        if fields[0] != b"PK\x01\x02" or _IN_ZIP64 in (compress_size, file_size, position):
            return None
        name = directory[at + _ENTRY.size : at + _ENTRY.size + name_size]
        if not name.isascii() or b"\0" in name:
            return None
        entries.append(ZipEntry(name.decode("ascii"), fields[6], compress_size, file_size))
        at += _ENTRY.size + name_size + extra_size + comment_size
    return entries if at == size and len(entries) == count else None
