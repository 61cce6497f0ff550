"""A check that the HDF5 library lacks.

Names in Keras files lie in global heaps. In a damaged heap, an object of size 0 keeps the library
in an endless loop, out of reach of Python: https://docs.hdfgroup.org/hdf5/develop/_f_m_t3.html
"""

from __future__ import annotations

import mmap
from pathlib import Path

from nfn_graph.converters.errors import ConversionError

_MARK = b"GCOL\x01\x00\x00\x00"
_HEADER = 16  # of the heap: mark and size; of an object: number, count, size


def check_heaps(path: Path) -> None:
    """Walks through the objects of every global heap of a file."""
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        start = data.find(_MARK)
        while start >= 0:
            size = int.from_bytes(data[start + 8 : start + _HEADER], "little")
            end = min(start + size, len(data))
            position = start + _HEADER
            while position + _HEADER <= end:
                number = int.from_bytes(data[position : position + 2], "little")
                length = int.from_bytes(data[position + 8 : position + _HEADER], "little")
                # The size of free space, number 0, counts its header.
                step = length if number == 0 else _HEADER + (length + 7) // 8 * 8
                if step < _HEADER:
                    raise ConversionError(
                        f"Expected objects of some size in the heap at byte {start} of '{path}' "
                        f"(got one of size {length}). It is damaged."
                    )
                position += step
            start = data.find(_MARK, start + 1)
