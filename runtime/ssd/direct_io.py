"""Reads and writes past the page cache, many pieces at once: through io_uring, or by a pool of threads.

Both engines block until every piece is done or has failed, continue short transfers, and leave no transfer that could
still touch the caller's memory. One thread may read while another writes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib
import os
import select
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from ...ir.errors import SsdError
from ..children import start_python

ALIGN_BYTES = 4096  # of addresses, positions and lengths; what O_DIRECT asks of every disk
IN_FLIGHT = 4  # pieces under way on each disk and in each direction
_SECTOR_BYTES = 512  # a short transfer is continued from a whole sector


@dataclass(frozen=True)
class Piece:
    """A contiguous part of one disk's file, and the memory that it is read into or written from.

    `position` counts within that disk's file `path`, `offset_bytes` within the striped file that it is a part of.
    """

    fd: int
    position: int
    memory: memoryview
    path: str
    offset_bytes: int


Check = Callable[[Piece], None]


class Engine(Protocol):
    """The engine that moves pieces. `check` is called with each piece, just before it is written or once it has been
    read.

    Both methods raise `SsdError`, and whatever `check` raises, when no transfer is under way any more.
    """

    name: str

    def read(self, pieces: Sequence[Piece], check: Check | None = None) -> None: ...

    def write(self, pieces: Sequence[Piece], check: Check | None = None) -> None: ...

    def close(self) -> None:
        """Wait for the transfers that are under way."""


class ThreadEngine:
    """`preadv` and `pwritev`, which run without the GIL, in two pools of threads: reads never queue after writes."""

    name = "threads"

    def __init__(self, num_disks: int):
        self.preadv: Callable[..., int] = os.preadv
        self.pwritev: Callable[..., int] = os.pwritev
        self._readers = ThreadPoolExecutor(num_disks * IN_FLIGHT, "ssd-read")
        self._writers = ThreadPoolExecutor(num_disks * IN_FLIGHT, "ssd-write")

    def read(self, pieces: Sequence[Piece], check: Check | None = None) -> None:
        def move(piece: Piece) -> None:
            self._move(self.preadv, piece, "read")
            if check is not None:
                check(piece)

        self._all(self._readers, move, pieces)

    def write(self, pieces: Sequence[Piece], check: Check | None = None) -> None:
        def move(piece: Piece) -> None:
            if check is not None:
                check(piece)
            self._move(self.pwritev, piece, "written")

        self._all(self._writers, move, pieces)

    def close(self) -> None:
        self._readers.shutdown()
        self._writers.shutdown()

    def _all(self, pool: ThreadPoolExecutor, move: Callable[[Piece], None], pieces: Sequence[Piece]) -> None:
        futures = [pool.submit(move, piece) for piece in pieces]
        try:
            for future in futures:
                future.result()
        finally:
            wait([future for future in futures if not future.cancel()])

    def _move(self, call: Callable[..., int], piece: Piece, done: str) -> None:
        moved = 0
        while moved < len(piece.memory):
            try:
                result = call(piece.fd, [piece.memory[moved:]], piece.position + moved)
            except OSError as error:
                raise failure(piece, moved, done, error.errno or errno.EIO) from error
            moved += progress(piece, moved, done, result)


class RingEngine:
    """io_uring, one ring in each direction.

    Raises ImportError without the wheel `liburing`, and OSError if the kernel refuses or the wheel dies here.
    """

    name = "io_uring"

    def __init__(self, num_disks: int):
        self._depth = num_disks * IN_FLIGHT
        self.read_ring = Ring(self._depth)
        self.write_ring = Ring(self._depth)
        self._reading = Lock()
        self._writing = Lock()

    def read(self, pieces: Sequence[Piece], check: Check | None = None) -> None:
        with self._reading:
            self._all(self.read_ring, pieces, None, check)

    def write(self, pieces: Sequence[Piece], check: Check | None = None) -> None:
        with self._writing:
            self._all(self.write_ring, pieces, check, None)

    def close(self) -> None:
        with self._reading, self._writing:
            self.read_ring.close()
            self.write_ring.close()

    def _all(self, ring: Ring, pieces: Sequence[Piece], before: Check | None, after: Check | None) -> None:
        done = "read" if ring is self.read_ring else "written"
        waiting = deque((tag, 0) for tag in range(len(pieces)))
        flying: dict[int, int] = {}  # bytes of each piece that earlier, short transfers have moved
        landed: list[Piece] = []
        try:
            while waiting or flying or landed:
                while waiting and len(flying) < self._depth:
                    tag, moved = waiting.popleft()
                    piece = pieces[tag]
                    if before is not None and not moved:
                        before(piece)
                    ring.put(tag, piece.fd, piece.memory[moved:], piece.position + moved, write=done == "written")
                    flying[tag] = moved
                while landed:  # checked while the disks work on the next ones
                    piece = landed.pop()
                    if after is not None:
                        after(piece)
                for tag, result in ring.await_completions() if flying else ():
                    piece, moved = pieces[tag], flying.pop(tag)
                    if result < 0 and -result != errno.EINTR:
                        raise failure(piece, moved, done, -result)
                    moved += progress(piece, moved, done, result) if result >= 0 else 0
                    if moved < len(piece.memory):
                        waiting.appendleft((tag, moved))
                    else:
                        landed.append(piece)
        finally:
            ring.drain()


_TRIAL = "import liburing; ring = liburing.Ring(); liburing.io_uring_queue_init(1, ring)"


@functools.cache
def why_no_ring() -> str:
    """The reason for which this process may not try to make a ring; empty if it may.

    The wheel of 2026.3 was built for processors with AVX-512, and kills its process on all others. So another process
    tries it. What else goes wrong there is told, by its exception, where a ring is made.
    """
    try:
        trial = start_python(_TRIAL, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code = trial.wait(60)
        finally:
            trial.kill()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be tried in another process: {error}"
    return "" if code >= 0 else f"the wheel liburing dies on this processor ({signal.Signals(-code).name})"


class Ring:
    """A submission and a completion queue of the kernel, by the wheel `liburing`.

    That wheel holds the GIL in every call, so completions are waited for with poll and never by the wheel; and requests
    are handed to the kernel's own threads, because a submission else pins their pages under the GIL. It also never lets
    go of a buffer that it was given: so it is given addresses, and each only once.
    """

    def __init__(self, depth: int):
        self._uring: Any = importlib.import_module("liburing")
        if why_no_ring():
            raise OSError(why_no_ring())
        self._ring = self._uring.Ring()
        self._uring.io_uring_queue_init(depth, self._ring)
        self._open = True
        self._cqe = self._uring.Cqe()
        self._iovecs: dict[tuple[int, int], Any] = {}  # by address and length
        self._flying: set[int] = set()  # tags
        self._poll = select.poll()
        self._poll.register(self._ring.ring_fd, select.POLLIN)

    def put(self, tag: int, fd: int, memory: memoryview, position: int, *, write: bool) -> None:
        """Start a transfer."""
        assert self._open, "a transfer after close"
        entry = self._uring.io_uring_get_sqe(self._ring)
        prepare = self._uring.io_uring_prep_writev if write else self._uring.io_uring_prep_readv
        prepare(entry, fd, self._iovec(memory), position)
        self._uring.io_uring_sqe_set_flags(entry, self._uring.IOSQE_ASYNC)
        entry.user_data = tag
        self._flying.add(tag)
        self._uring.io_uring_submit(self._ring)

    def _iovec(self, memory: memoryview) -> Any:
        key = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        if key not in self._iovecs:
            self._iovecs[key] = self._uring.Iovec([memoryview((ctypes.c_ubyte * key[1]).from_address(key[0]))])
        return self._iovecs[key]

    def await_completions(self) -> list[tuple[int, int]]:
        """Wait for at least one completion. Returns (tag, bytes moved or minus an errno) of all that are there."""
        found: list[tuple[int, int]] = []
        while not found:
            self._poll.poll()
            while self._uring.io_uring_cq_ready(self._ring):
                self._uring.io_uring_peek_cqe(self._ring, self._cqe)
                entry = self._cqe[0]
                found.append((entry.user_data, entry.res))
                self._uring.io_uring_cqe_seen(self._ring, entry)
                self._flying.discard(found[-1][0])
        return found

    def drain(self) -> None:
        """Wait until nothing is under way; the results are dropped."""
        while self._flying:
            self.await_completions()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._uring.io_uring_queue_exit(self._ring)


def progress(piece: Piece, moved: int, done: str, result: int) -> int:
    """The number of the `result` bytes of a transfer that count as moved. Raises `SsdError` if none do."""
    if moved + result == len(piece.memory):
        return result
    useful = result // _SECTOR_BYTES * _SECTOR_BYTES
    if useful == 0:
        raise SsdError(
            f"{piece.path}: {result} bytes were {done} at byte {piece.position + moved}, where "
            f"{len(piece.memory) - moved} were asked for: the file ends there or the disk has failed.",
            file=piece.path,
            offset_bytes=piece.offset_bytes + moved,
        )
    return useful


def failure(piece: Piece, moved: int, done: str, number: int) -> SsdError:
    """The error to raise when the system reports `number` (an errno) after the first `moved` bytes of a piece."""
    hint = {
        errno.ENOSPC: "The disk is full, although the space was reserved: on a file system that copies on write, "
        "leave more of it free or name another directory.",
        errno.EIO: "The disk has failed; look into the kernel's log and name a directory on another disk.",
    }.get(number, "Name a directory on another disk.")
    return SsdError(
        f"{piece.path}: {len(piece.memory) - moved} bytes at byte {piece.position + moved} could not be {done}: "
        f"{os.strerror(number)} (errno {number}). {hint}",
        file=piece.path,
        offset_bytes=piece.offset_bytes + moved,
        errno=number,
    )
