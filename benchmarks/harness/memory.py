"""The memory of a process, and the peak memory of the tensors of a function."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def resident(field: str) -> float:
    """Returns megabytes of this process on Linux: `VmRSS`, `VmHWM` (peak), `RssAnon`, `RssFile`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**10


def return_freed() -> None:
    """Returns the memory of freed objects to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def forget_peak() -> None:
    """Resets the kernel's record of the largest size of the process."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Returns the largest number of bytes that a function has allocated at any time.

    On the CPU all storages that operations return are counted for as long as they live, so the
    figure does not depend on what the system's allocator keeps.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with _Storages() as storages:
        function()
    return storages.peak


class _Storages(TorchDispatchMode):
    """Follows the storages that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.live: set[int] = set()
        self.now = self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {_pointer(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, Tensor) or _pointer(x) in given | self.live:
                continue
            storage = x.untyped_storage()
            self.live.add(_pointer(x))
            self.now += storage.nbytes()
            weakref.finalize(storage, self._free, _pointer(x), storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, pointer: int, size: int) -> None:
        self.live.discard(pointer)
        self.now -= size


def _pointer(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
