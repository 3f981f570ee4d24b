"""How this process's C library treats memory that computation on a CPU device frees: it stays here for the next use.

By default freed memory goes back to the kernel, which hands it out again page by page, zeroed: with what a step of
training takes and frees, several per cent of its time. A device's memory is its own, so it keeps what it once had.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # as in glibc's malloc.h
_NEVER = 2**31 - 1
_OWN_MAPPING_BYTES = 2**30  # larger blocks are still mapped alone, and unmapped


def keep_freed_memory() -> bool:
    """From here on, freed blocks wait in this process for their next use. False where malloc is not glibc's."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, _OWN_MAPPING_BYTES), (_TRIM_THRESHOLD, _NEVER))
    return all(mallopt(name, value) == 1 for name, value in settings)
