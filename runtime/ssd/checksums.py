"""A checksum for each page of a file, so that regions of any bounds can be compared with what was written."""

from __future__ import annotations

import numpy as np

PAGE_BYTES = 4096
_PAGES_AT_ONCE = 256  # more would leave the caches, fewer would have to wait for the GIL more often


class PageSums:
    """Checksums, kept in memory (4 bytes a page), of a file that is written and read in whole pages.

    A page of 32-bit words x is hashed to the upper half of `sum(w_i * x_i) mod 2**64` with weights w drawn anew for
    each object: two different pages collide with a probability of 2**-32, whichever they are. Unlike a CRC per page
    it is computed for many pages in one numpy call, which runs without the GIL.
    """

    def __init__(self, num_bytes: int):
        self._sums = np.zeros(-(-num_bytes // PAGE_BYTES), np.uint32)
        # x = low + 2**32 * high for each 64-bit word: x * all + high * more gives low and high weights of their own.
        self._all, self._more = np.random.default_rng().integers(0, 2**64, (2, PAGE_BYTES // 8), dtype=np.uint64)

    def put(self, offset_bytes: int, memory: memoryview) -> None:
        """Remember what `memory` holds now as the contents from `offset_bytes` on."""
        sums = self._sums_of(memory)
        first = offset_bytes // PAGE_BYTES
        self._sums[first : first + len(sums)] = sums

    def wrong_page(self, offset_bytes: int, memory: memoryview) -> int | None:
        """The offset of the first page of `memory` that is not what `put` saw there; None if there is none."""
        sums = self._sums_of(memory)
        first = offset_bytes // PAGE_BYTES
        differ = np.flatnonzero(self._sums[first : first + len(sums)] != sums)
        return (first + int(differ[0])) * PAGE_BYTES if len(differ) else None

    def _sums_of(self, memory: memoryview) -> np.ndarray:
        pages = np.frombuffer(memory, np.uint64).reshape(-1, PAGE_BYTES // 8)
        sums = np.empty(len(pages), np.uint32)
        for begin in range(0, len(pages), _PAGES_AT_ONCE):
            some = pages[begin : begin + _PAGES_AT_ONCE]
            sums[begin : begin + len(some)] = (some @ self._all + (some >> 32) @ self._more) >> 32
        return sums
