"""A step that a bad batch spoils: no device of the job makes an update in it, and it can be undone.

A device finds the step bad in a forward, or by a loss that is not finite. It tells all others and goes on, and updates
later in the step are left out: nothing breaks off. Every update comes after all forwards of its step, whatever device
they are on, as gradients come from them. On a CPU device they are over by then. The host of a GPU issues both long
before they run: it looks at the losses of its device while the GPU is at work on their backward, and issues no update
before the hosts of all GPUs have done so.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CELL_BYTES = struct.calcsize("q")
ALL_STEPS = 2**62


class BadStep:
    """The verdicts of a job's devices on its steps. Each has a cell: `write` sets this device's, `read` copies those of
    all. It has the number of the last step whose losses the device has looked at, negative if that step is bad;
    `ALL_STEPS` where nobody need wait for it. Steps are counted with those that were undone, so that a number says one
    only."""

    def __init__(self, write: Callable[[int], None], read: Callable[[], Sequence[int]]):
        self._write, self._read = write, read
        self._own = 0
        self._asked = 0, False  # the number of the step that was asked for last, and the answer, which is final
        self.looks_later = False  # whether updates of other devices may be issued before this one has seen its losses
        self.number = 0  # of the step that began last, the same on all devices
        self.found: tuple[Any, BaseException] | None = None  # the op and error by which this device found it bad
        self._tell(0)

    @staticmethod
    def local() -> BadStep:
        """That of a process with the only device."""
        cells = [0]
        return BadStep(lambda number: cells.__setitem__(0, number), lambda: cells)

    @staticmethod
    def open(path: Path, device: int, num_devices: int) -> BadStep:
        """That of the processes that share a file, which the first to come makes."""
        with open(path, "a+b") as file:
            file.truncate(CELL_BYTES * num_devices)
            cells = memoryview(mmap.mmap(file.fileno(), CELL_BYTES * num_devices)).cast("q")
        return BadStep(lambda number: cells.__setitem__(device, number), cells.tolist)

    def begin(self) -> None:
        """A step begins."""
        self.number += 1
        if not self.looks_later and self._own != ALL_STEPS:
            self._tell(ALL_STEPS)

    def note(self, number: int, op: Any, error: BaseException) -> None:
        """Step `number` is bad; the first error of a device counts, as others may follow from it. 0: an evaluation."""
        self.found = self.found or (op, error)
        if number:
            self._tell(-number)

    def pass_losses(self, number: int) -> None:
        """This device has looked at all its losses of a step."""
        if self.looks_later and abs(self._own) != number:
            self._tell(number)

    def verdict(self, number: int) -> bool | None:
        """Whether a step is bad, None while that is not known. An update asks, after all forwards of the step."""
        if self._asked[0] != number:
            cells = self._read()
            is_bad = -number in cells
            if not is_bad and any(abs(cell) < number for cell in cells):
                return None
            self._asked = number, is_bad
        return self._asked[1]

    def _tell(self, number: int) -> None:
        self._own = number
        self._write(number)
