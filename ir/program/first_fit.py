"""First fit: places in one block of memory, taken and given back in a known order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable


class FirstFit:
    """Each value gets the lowest place that is free and large enough. `size` is what the block must hold."""

    def __init__(self, alignment: int):
        self.alignment = alignment
        self.size = 0
        self._live: list[tuple[int, int, int]] = []  # (offset, end, number), sorted
        self._row_of: dict[Hashable, tuple[int, int, int]] = {}
        self._taken = 0

    def take(self, key: Hashable, num_bytes: int) -> int:
        """The offset of a new value."""
        need, offset = -(-num_bytes // self.alignment) * self.alignment, 0
        for start, end, _ in self._live:
            if offset + need <= start:
                break
            if end > offset:
                offset = end
        self._taken += 1
        self._row_of[key] = row = (offset, offset + need, self._taken)
        insort(self._live, row)
        self.size = max(self.size, offset + need)
        return offset

    def give(self, key: Hashable) -> None:
        """Give the key's place back; does nothing if it has none."""
        row = self._row_of.pop(key, None)
        if row is not None:
            del self._live[bisect_left(self._live, row)]
