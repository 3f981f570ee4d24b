"""First fit: places in one block of memory, taken and given back in a known order."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable


class FirstFit:
    """Each value gets the lowest place that is free and large enough. `size` is what the block must hold."""

    def __init__(self, alignment: int):
        self.alignment = alignment
        self.size = 0
        self._gaps: list[tuple[int, float]] = [(0, math.inf)]  # (offset, end) of what is free, sorted; no two touch
        self._place_of: dict[Hashable, tuple[int, int]] = {}

    def take(self, key: Hashable, num_bytes: int) -> int:
        """The offset of a new value."""
        need, offset = -(-num_bytes // self.alignment) * self.alignment, 0
        if need:
            for i, (offset, end) in enumerate(self._gaps):
                if end - offset >= need:
                    self._gaps[i : i + 1] = [(offset + need, end)] if end - offset > need else []
                    break
        self._place_of[key] = (offset, offset + need)
        self.size = max(self.size, offset + need)
        return offset

    def give(self, key: Hashable) -> None:
        """Give the key's place back; does nothing if it has none."""
        start, end = self._place_of.pop(key, (0, 0))
        if start == end:
            return
        gaps, at = self._gaps, bisect_left(self._gaps, (start, end))
        upto = at
        free_end: float = end
        if gaps[at][0] == end:  # the last one is above all values
            free_end, upto = gaps[at][1], at + 1
        if at and gaps[at - 1][1] == start:
            at, start = at - 1, gaps[at - 1][0]
        gaps[at:upto] = [(start, free_end)]
