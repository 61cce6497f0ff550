"""Reads HDF5 files in another process, because a damaged file can crash or hang the library."""

from __future__ import annotations

import atexit
import json
import math
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from nfn_graph.converters.errors import ConversionError
from nfn_graph.converters.files import hdf5_process
from nfn_graph.converters.files.checks import MAX_COMPRESSION, check_declared
from nfn_graph.converters.files.npz import Array

#: The seconds after which reading a file is given up; large files get more time.
SECONDS = 30.0
_BYTES_PER_SECOND = 5 * 2**20
# The memory of the libraries, and of everything in a file beside its arrays.
_MEMORY = 2 * 2**30


_HEAP_MARK = b"GCOL\x01\x00\x00\x00"
_HEAP_HEADER = 16  # For a heap: mark and size. For an object: number, count and size.


class ProcessEnded(Exception):
    """The reader process crashed or returned an invalid answer."""


class Reader:
    """A process that reads HDF5 files, one after the other."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(hdf5_process.__file__), json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise OSError("no pipes to the process")
        self._requests, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process can take requests; only the process that started it can send them."""
        return self.owner == os.getpid() and self._process.poll() is None

    def ask(self, **request: Any) -> None:
        """Sends a request."""
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        except (OSError, ValueError) as error:
            raise ProcessEnded from error

    def answer(self) -> tuple[dict[str, Any], bytearray]:
        """Receives the next answer, and the bytes of the requested array."""
        try:
            reply = json.loads(self._receive(int.from_bytes(self._receive(8), "little")))
            if not isinstance(reply, dict):
                raise ProcessEnded
            return reply, self._receive(int(reply.get("size", 0)))
        except ProcessEnded:
            raise
        except Exception as error:  # A crashing process may have written anything.
            raise ProcessEnded from error

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Kills the process after some time, because not all systems support its own alarm."""
        timer = threading.Timer(seconds, self._process.kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _receive(self, size: int) -> bytearray:
        # `readinto` avoids the copy that `read` would make.
        data = bytearray(size)
        view, position = memoryview(data), 0
        while position < size:
            read = self._answers.readinto(view[position:])  # type: ignore[attr-defined]
            if not read:
                raise ProcessEnded
            position += read
        return data

    def end(self) -> int:
        """Ends the process; returns its exit code."""
        if self.owner != os.getpid():
            return 0
        self._process.kill()
        for stream in (self._requests, self._answers):
            with suppress(OSError):
                stream.close()
        return self._process.wait()


_readers: list[Reader] = []
_lock = threading.RLock()


def reader() -> Reader:
    """Returns the process that reads files, which is started when needed and after a crash."""
    with _lock:
        if not _readers or not _readers[0].is_alive:
            if _readers:
                _readers.pop().end()
            try:
                _readers.append(Reader())
            except OSError as error:
                raise ConversionError(
                    f"Expected to start a process that reads .h5 files (got {error})"
                ) from error
        return _readers[0]


@atexit.register
def _end() -> None:
    for process in _readers:
        process.end()


def read_hdf5(
    path: Path, keys: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Reads the layers and all arrays of a Keras file, or the arrays with given keys."""
    what = "Keras .h5 file" if keys is None else ".h5 file"
    size = path.stat().st_size
    seconds = SECONDS + size / _BYTES_PER_SECOND
    memory = _MEMORY + 2 * MAX_COMPRESSION * size
    with _lock:
        process = reader()
        try:
            with process.within(seconds):
                return _read(process, path, keys, what, {"seconds": seconds, "memory": memory})
        except ConversionError:
            raise
        except (ProcessEnded, KeyError, AttributeError, TypeError, ValueError) as error:
            code = process.end()
            raise ConversionError(
                f"Expected a complete {what} in '{path}' (got one that crashes the process that "
                f"reads it, with code {code}, or takes it more than {seconds:.3g} s). It is "
                f"damaged."
            ) from error
        except BaseException:
            # A reply to this request may still arrive, and must not be read for the next file.
            process.end()
            raise


def _read(
    process: Reader, path: Path, keys: Sequence[str] | None, what: str, limits: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Array]]:
    size = path.stat().st_size
    process.ask(path=os.path.abspath(path), name=str(path), arrays=keys, **limits)
    contents, _ = process.answer()
    _check_answer(path, what, contents)
    try:
        declared = {k: _declared(path, k, array, size) for k, array in contents["arrays"].items()}
    except ConversionError:
        process.ask(keys=[], **limits)  # Closes the file.
        raise
    process.ask(keys=list(declared), **limits)
    arrays: dict[str, Array] = {}
    for key, (shape, dtype) in declared.items():
        answer, data = process.answer()
        _check_answer(path, what, answer)
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise ProcessEnded
        arrays[key] = np.ndarray(shape, dtype, data)
    return contents, arrays


def _declared(
    path: Path, key: str, array: Mapping[str, Any], size: int
) -> tuple[tuple[int, ...], np.dtype[Any]]:
    shape, dtype = tuple(map(int, array["shape"])), np.dtype(array["dtype"])
    stored = min(int(array["stored"]), size)
    available = stored * (MAX_COMPRESSION if array["is_packed"] else 1)
    check_declared(path, key, shape, dtype.itemsize, available)
    return shape, dtype


def _check_answer(path: Path, what: str, reply: Mapping[str, Any]) -> None:
    if reply.get("refused") is not None:
        raise ConversionError(str(reply["refused"]))
    if "error" in reply:
        raise ConversionError(
            f"Expected a complete {what} in '{path}' (got one that cannot be read: "
            f"{reply['error']}). It is truncated or damaged."
        )


def check_heaps(path: Path) -> None:
    """Checks the objects of every global heap of a file, because the library does not.

    Names in Keras files are stored in global heaps. An object of size 0 in a damaged heap sends the
    library into an endless loop: https://docs.hdfgroup.org/hdf5/develop/_f_m_t3.html
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(_HEAP_MARK)
        while start >= 0:
            size = int.from_bytes(data[start + 8 : start + _HEAP_HEADER], "little")
            end = min(start + size, len(data))
            position = start + _HEAP_HEADER
            while position + _HEAP_HEADER <= end:
                number = int.from_bytes(data[position : position + 2], "little")
                length = int.from_bytes(data[position + 8 : position + _HEAP_HEADER], "little")
                # The size of free space, which has number 0, includes its header.
                step = length if number == 0 else _HEAP_HEADER + (length + 7) // 8 * 8
                if step < _HEAP_HEADER:
                    raise ConversionError(
                        f"Expected objects of nonzero size in the heap at byte {start} of '{path}' "
                        f"(got one of size {length}). It is damaged."
                    )
                position += step
            start = data.find(_HEAP_MARK, start + 1)
