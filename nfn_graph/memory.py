"""What a process does with the memory that it frees."""

from __future__ import annotations

import ctypes
import platform

# The names of glibc's `mallopt`, in its header malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_memory() -> bool:
    """Makes this process keep freed memory for its next tensors; returns whether it could.

    The allocator of Linux (glibc) returns every large tensor to the system when it is freed, and
    the next one of that size is cleared page by page. Training on a CPU spends up to half of its
    time there. After this call the process keeps what it has used, so its memory stays at the
    peak. There is no way back: call it once, at the start of a program that trains.

    The commands of `nfn-graph` call it; the library by itself never does. On other systems, and
    with other allocators, it does nothing.

    Example:
        >>> from nfn_graph import keep_memory
        >>> isinstance(keep_memory(), bool)
        True
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # No blocks of their own for large tensors, no return of free memory at the top of the heap,
    # and steps of 64 MB when it grows.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 2**26}
    done = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(done)
