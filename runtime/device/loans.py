"""Device memory that one stream took and another one reads: held until the stream that took it comes after the reader.

torch's allocator gives each stream memory of its own, and hands out what was let go of at once, because the stream's
next task comes after all that it has run. A reader on another stream is no such task. `record_stream` would let the
host find out when the reader is over, and makes it wait for that where memory runs short: for ever, if the reader is a
message that another device answers only after one that this host has still to send. A loan is let go of where the
stream that took the memory has itself been told to wait for the reader, as the program's order says
(`ir/program/order.py`). So the host waits for nothing, and what is reserved follows from the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..optimizer.gradients import Grads
from ..stage.runner import Kept
from .streams import Stream


class Box:
    """A value that may not exist yet. All its users hold the box; the memory is free once the last of them lets go, and
    no loan of it is left.

    `stream`: that from whose memory the value was taken, None for memory that is not given back in a step. `others`:
    tensors in it that other streams took.
    """

    __slots__ = ("others", "stream", "value")

    def __init__(self, stream: Stream | None = None, value: Any = None):
        self.stream = stream
        self.value = value
        self.others: list[tuple[Stream, list[Tensor]]] = []

    def inherit(self, old: Box, before: set[int]) -> None:
        """Belong to whom `old` belonged to, in the place of which a task made this box's value. `before`: the storages
        that were in it then."""
        maker, self.stream = self.stream, old.stream
        self.others += old.others
        if maker is not None and maker is not old.stream:
            fresh = [t for t in tensors_in(self.value) if t.untyped_storage().data_ptr() not in before]
            self.others += [(maker, fresh)] if fresh else []

    def keep(self, old: Box) -> None:
        """Have parts of `old` within, of which this box's maker knows only that they may be there."""
        if old.stream is not None and old.stream is not self.stream:
            self.others.append((old.stream, tensors_in(old.value)))
        self.others += old.others


class Loans:
    """The loans of one run. Ops are named by their indices, which grow along each stream."""

    def __init__(self) -> None:
        self._open: dict[Stream, dict[Stream, deque[tuple[int, list[Tensor]]]]] = {}  # by taker, then by reader
        self._passed: dict[Stream, dict[Stream, int]] = {}  # per stream, the last op of others that it has waited for

    def passed(self, stream: Stream, waits: Sequence[tuple[Stream, int]]) -> dict[Stream, int]:
        """Note that a stream's next task waits for these ops; returns the last op of each other stream that it comes
        after."""
        row = self._passed.setdefault(stream, {})
        for other, index in waits:
            row[other] = max(index, row.get(other, index))
        return dict(row)

    def settle(self, stream: Stream, passed: dict[Stream, int]) -> None:
        """Let go of what readers before these ops have borrowed from a stream. Called by its task, after its waits."""
        for reader, rows in list(self._open.get(stream, {}).items()):  # the issuing thread may add one meanwhile
            last = passed.get(reader, -1)
            while rows and rows[0][0] <= last:
                rows.popleft()

    def end(self) -> None:
        """Let go of everything. Called when all streams are done."""
        self._open.clear()

    def lend(self, box: Box, reader: Stream, index: int) -> None:
        """Hold a value that the op `index` on the stream `reader` reads."""
        if box.stream is not None and box.stream is not reader:
            self._lend(box.stream, tensors_in(box.value), reader, index)
        for taker, tensors in box.others:
            if taker is not reader:
                self._lend(taker, tensors, reader, index)

    def _lend(self, taker: Stream, tensors: list[Tensor], reader: Stream, index: int) -> None:
        if tensors:
            self._open.setdefault(taker, {}).setdefault(reader, deque()).append((index, tensors))


def storages_in(value: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_in(value)}


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Grads):
        return [*value.tensors.values(), *value.flats, *([] if value.factor is None else [value.factor])]
    if isinstance(value, Kept):
        return list(value.tensors.values())
    return [value] if isinstance(value, Tensor) else []
