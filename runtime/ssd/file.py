"""One scratch file, striped in chunks over the disks of an `SsdFolder`."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
from torch import Tensor

from ...ir.errors import SsdError
from .checksums import PageSums
from .direct_io import ALIGN_BYTES, Engine, Piece
from .extents import Extent


@dataclass
class FolderTraffic:
    """The counters that the files of one folder share, in bytes moved so far."""

    engine: Engine
    chunk_bytes: int
    closed: bool = False
    read_bytes: int = 0
    written_bytes: int = 0
    lock: Lock = field(default_factory=Lock, repr=False)


@dataclass(frozen=True)
class Stripe:
    """The part of a file that one disk holds: of n disks every n-th chunk, one after the other."""

    fd: int
    path: str


class SsdFile:
    """`num_bytes` of space on SSD: whole multiples of 4096 bytes. Made by `SsdFolder.reserve`.

    Chunk c is on stripe `(first + c) % len(stripes)`. Reads and writes block until done; one thread may read while
    another writes, as long as their regions do not overlap. `sums`: the checksums, if contents are checked.
    `extents`: in order, pages that count as written, and are read where the user has them, until others are written.
    """

    def __init__(
        self,
        name: str,
        num_bytes: int,
        stripes: Sequence[Stripe],
        first: int,
        home: FolderTraffic,
        sums: PageSums | None = None,
        extents: Sequence[Extent] = (),
    ):
        self.name = name
        self.num_bytes = num_bytes
        self.stripes = tuple(stripes)
        self._first = first
        self._home = home
        self._sums = sums
        self._extents = [*extents]
        self._written = Regions()
        for extent in extents:
            self._written.add(extent.begin, extent.end)

    def read(self, offset_bytes: int, into: Tensor) -> None:
        """Fill `into` (uint8, on the host, address and length multiples of 4096) from `offset_bytes` on.

        Raises `SsdError` if the disk fails, a part was never written (or its writing failed), or contents have changed
        since and the folder was made with `verify`.
        """
        memory = self._memory(offset_bytes, into)
        with self._home.lock:
            hole = self._written.first_hole(offset_bytes, offset_bytes + len(memory))
        if hole is not None:
            raise SsdError(
                f"{self.name}: byte {hole} was never written; bytes {offset_bytes} to {offset_bytes + len(memory)} "
                "cannot be read before that.",
                file=self.stripes[self._disk(hole)].path,
                offset_bytes=hole,
            )
        compare = None if self._sums is None else self._compare
        for extent in self._extents_in(offset_bytes, offset_bytes + len(memory)):
            extent.require_unchanged()
            os.posix_fadvise(extent.fd, extent.position, len(extent), os.POSIX_FADV_WILLNEED)
        self._home.engine.read(list(self._pieces(offset_bytes, memory)), compare)
        with self._home.lock:
            self._home.read_bytes += len(memory)

    def write(self, offset_bytes: int, source: Tensor) -> None:
        """Store `source` (uint8, on the host, address and length multiples of 4096) from `offset_bytes` on. Extents
        that have these contents already stay.

        Raises `SsdError` if the disk fails; the whole region then counts as never written.
        """
        memory = self._memory(offset_bytes, source)
        for extent in self._extents_in(offset_bytes, offset_bytes + len(memory)):
            if not self._has(extent, memory[extent.begin - offset_bytes : extent.end - offset_bytes]):
                self._drop(extent)
        own = {stripe.fd for stripe in self.stripes}
        pieces = [piece for piece in self._pieces(offset_bytes, memory) if piece.fd in own]
        with self._home.lock:
            self._written.remove(offset_bytes, offset_bytes + len(memory))
        remember = None if self._sums is None else self._remember
        self._home.engine.write(pieces, remember)
        with self._home.lock:
            self._written.add(offset_bytes, offset_bytes + len(memory))
            self._home.written_bytes += sum(len(piece.memory) for piece in pieces)

    def _extents_in(self, begin: int, end: int) -> list[Extent]:
        """The parts of extents between two bytes."""
        return [extent.cut(begin, end) for extent in self._extents if extent.begin < end and begin < extent.end]

    def _has(self, extent: Extent, wanted: memoryview) -> bool:
        """Whether the user's file has these contents."""
        step = self._home.chunk_bytes
        parts = (wanted[done : done + step] for done in range(0, len(wanted), step))
        return all(
            os.pread(extent.fd, len(part), extent.position + number * step) == part for number, part in enumerate(parts)
        )

    def _drop(self, extent: Extent) -> None:
        """From here on these pages are the file's own."""
        rests = [
            each.cut(begin, end)
            for each in self._extents
            for begin, end in ((each.begin, extent.begin), (extent.end, each.end))
        ]
        self._extents = [each for each in rests if each.begin < each.end]

    def _memory(self, offset_bytes: int, tensor: Tensor) -> memoryview:
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(), f"{self.name}: flat uint8"
        aligned = offset_bytes % ALIGN_BYTES == tensor.data_ptr() % ALIGN_BYTES == len(tensor) % ALIGN_BYTES == 0
        assert aligned, f"{self.name}: {offset_bytes}, {tensor.data_ptr():#x}, {len(tensor)}: not multiples of 4096"
        assert 0 <= offset_bytes <= self.num_bytes - len(tensor), f"{self.name}: region past the end"
        if self._home.closed:
            raise SsdError(f"{self.name}: its files were removed when the folder was closed.", file=self.name)
        return tensor.detach().numpy().data

    def _disk(self, offset_bytes: int) -> int:
        return (self._first + offset_bytes // self._home.chunk_bytes) % len(self.stripes)

    def _pieces(self, offset_bytes: int, memory: memoryview) -> Iterator[Piece]:
        """The pieces of a region, which is cut at the borders of chunks and extents."""
        chunk, begin, end = self._home.chunk_bytes, offset_bytes, offset_bytes + len(memory)
        while begin < end:
            index, inside = divmod(begin, chunk)
            extent = next((extent for extent in self._extents if begin < extent.end), None)  # this one or the next
            if extent is None or begin < extent.begin:
                border, stripe = end if extent is None else extent.begin, self.stripes[self._disk(begin)]
                fd, path, position = stripe.fd, stripe.path, index // len(self.stripes) * chunk + inside
            else:
                border, fd, path = extent.end, extent.fd, extent.path
                position = extent.position + begin - extent.begin
            length = min(chunk - inside, end - begin, border - begin)
            part = memory[begin - offset_bytes : begin - offset_bytes + length]
            yield Piece(fd, position, part, path, begin)
            begin += length

    def _remember(self, piece: Piece) -> None:
        assert self._sums is not None
        self._sums.put(piece.offset_bytes, piece.memory)

    def _compare(self, piece: Piece) -> None:
        assert self._sums is not None
        wrong = self._sums.wrong_page(piece.offset_bytes, piece.memory)
        if wrong is not None:
            position, chunk = piece.position + wrong - piece.offset_bytes, wrong // self._home.chunk_bytes
            raise SsdError(
                f"{piece.path}: its 4096 bytes from {position} on (in chunk {chunk} of {self.name}) "
                "are not those that were written. The disk or its link corrupts data: resume from the last checkpoint "
                "with another disk.",
                file=piece.path,
                offset_bytes=wrong,
            )


class Regions:
    """A set of whole numbers, kept as sorted disjoint ranges [begin, end)."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        """Add a range; ranges that touch become one."""
        if begin == end:
            return
        first, after = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < after:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[after - 1])
        self._begins[first:after], self._ends[first:after] = [begin], [end]

    def remove(self, begin: int, end: int) -> None:
        first, after = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        if first >= after or begin == end:
            return
        rests = [(self._begins[first], begin), (end, self._ends[after - 1])]
        rests = [(low, high) for low, high in rests if low < high]
        self._begins[first:after] = [low for low, _ in rests]
        self._ends[first:after] = [high for _, high in rests]

    def first_hole(self, begin: int, end: int) -> int | None:
        """The first number of [begin, end) that is not in the set; None if all are."""
        index = bisect_right(self._begins, begin) - 1
        covered = self._ends[index] if index >= 0 else 0
        reached = max(begin, covered)
        return reached if reached < end else None
