"""A step that a bad batch spoils: no device of the job makes an update in it, and it can be undone.

A device finds the step bad in a forward, and every update comes after all forwards of its step, whatever device they
are on, as gradients come from them. So the device says it in a cell that all devices share, goes on, and updates later
in the step are left out: nothing breaks off, and no device waits for another.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import MutableSequence
from pathlib import Path
from typing import Any, cast

CELL_BYTES = struct.calcsize("q")


class BadStep:
    """`cell`: the number of the last step that was bad, shared by all devices of the job; 0 for none. Steps are counted
    with those that were undone, so that a number says one only."""

    def __init__(self, cell: MutableSequence[int]):
        self._cell = cell
        self.number = 0  # of the step that began last, the same on all devices
        self.found: tuple[Any, BaseException] | None = None  # the op and error by which this device found it bad

    @staticmethod
    def open(path: Path) -> BadStep:
        """That of the processes that share a file, which the first to come makes."""
        with open(path, "a+b") as file:
            file.truncate(CELL_BYTES)
            cell = memoryview(mmap.mmap(file.fileno(), CELL_BYTES)).cast("q")
        return BadStep(cast("MutableSequence[int]", cell))

    def note(self, number: int, op: Any, error: BaseException) -> None:
        """Step `number` is bad; the first error of a device counts, as others may follow from it. 0: an evaluation."""
        self.found = self.found or (op, error)
        if number:
            self._cell[0] = number

    def spoils(self, number: int) -> bool:
        return self._cell[0] == number
