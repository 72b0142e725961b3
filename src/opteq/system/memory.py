"""The C library's memory, kept for the next use."""

from __future__ import annotations

import ctypes
import sys

# Parameters of glibc's mallopt: give nothing back, take 64 MiB at a time, map no block by itself, which would
# be anew each time, and let all threads share what there is.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_SETTINGS = (
    (_TRIM_THRESHOLD, 2**31 - 1),
    (_TOP_PAD, 2**26),
    (_MMAP_MAX, 0),
    (_ARENA_MAX, 1),
)


def keep_freed_memory() -> bool:
    """Let the process keep the memory that it frees, so that the next tensor finds it ready.

    PyTorch has no cache of its own on CPUs. glibc returns freed memory to the system at every peak, and the
    system clears every page that it hands out again: at some hundred kilobytes to some megabytes per tensor,
    a solve spends about a tenth of its time on that. The command `opteq` calls this for its own process; a
    script of yours may, before its first tensors. The process then stays as large as it has been at most.

    Returns:
        Whether the C library took the settings; other libraries than glibc have none.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*setting) == 1 for setting in _SETTINGS)
