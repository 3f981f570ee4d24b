"""A step that a bad batch spoils: no device of the job makes an update in it, and it can be undone.

A device finds the step bad in a forward, and every update comes after all forwards of its step, whatever device they
are on, as gradients come from them. So the device tells all others, goes on, and updates later in the step are left
out: nothing breaks off, and no device waits for another.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

CELL_BYTES = struct.calcsize("q")


class BadStep:
    """`tell`: tells all devices of the job that a step is bad; `is_told`: whether one of them has. Steps are counted
    with those that were undone, so that a number says one only."""

    def __init__(self, tell: Callable[[int], None], is_told: Callable[[int], bool]):
        self._tell, self._is_told = tell, is_told
        self._asked = 0, False  # the number of the step that was asked for last, and the answer, which is final
        self.number = 0  # of the step that began last, the same on all devices
        self.found: tuple[Any, BaseException] | None = None  # the op and error by which this device found it bad

    @staticmethod
    def local() -> BadStep:
        """That of a process with all devices."""
        bad = set[int]()
        return BadStep(bad.add, bad.__contains__)

    @staticmethod
    def open(path: Path) -> BadStep:
        """That of the processes that share a file, which the first to come makes."""
        with open(path, "a+b") as file:
            file.truncate(CELL_BYTES)
            cell = memoryview(mmap.mmap(file.fileno(), CELL_BYTES)).cast("q")
        return BadStep(lambda number: cell.__setitem__(0, number), lambda number: cell[0] == number)

    def note(self, number: int, op: Any, error: BaseException) -> None:
        """Step `number` is bad; the first error of a device counts, as others may follow from it. 0: an evaluation."""
        self.found = self.found or (op, error)
        if number:
            self._tell(number)

    def spoils(self, number: int) -> bool:
        """Whether a step is bad. An update asks, after all forwards of the step."""
        if self._asked[0] != number:
            self._asked = number, self._is_told(number)
        return self._asked[1]
