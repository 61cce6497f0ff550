"""How a process handles the memory that it frees."""

from __future__ import annotations

import ctypes
import platform

# Parameters of glibc's `mallopt`, from its header malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_memory() -> bool:
    """Makes this process keep freed memory for its next tensors; returns whether that worked.

    The allocator of Linux (glibc) returns every large tensor to the system when it is freed, and
    the system clears the next one of that size page by page. Training on a CPU spends up to half of
    its time there. After this call the process keeps the memory that it has used, so its size stays
    at the peak. The call cannot be undone: make it once, at the start of a program that trains.

    The commands of `nfn-graph` call this function, but the library itself never does. It has no
    effect on other systems or with other allocators.

    Example:
        >>> from nfn_graph import keep_memory
        >>> isinstance(keep_memory(), bool)
        True
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Large tensors get no blocks of their own, free memory at the top of the heap is not returned,
    # and the heap grows in steps of 64 MB.
    settings = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 2**26}
    done = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(done)
