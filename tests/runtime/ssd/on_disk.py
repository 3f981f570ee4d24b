"""The helpers of tests of scratch files: directories on a real disk, aligned memory, the engines that work here."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.runtime.ssd.direct_io import Engine, RingEngine, ThreadEngine
from penstock.runtime.ssd.directory import file_systems

PAGE = 4096


def directories(parent: Path, count: int = 1) -> list[Path]:
    """`count` new directories in `parent`. Skips the test where that is not on a disk with O_DIRECT."""
    if file_systems().get(parent.stat().st_dev) in ("tmpfs", "ramfs"):
        pytest.skip("the folder of temporary files is in memory; name another with --basetemp")
    found = [parent / f"disk{number}" for number in range(count)]
    for directory in found:
        directory.mkdir()
    return found


def aligned_memory(num_bytes: int, seed: int | None = None) -> Tensor:
    """Memory at a multiple of 4096: random bytes, or ones where no seed is given."""
    whole = torch.ones(num_bytes + PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE
    memory = whole[start : start + num_bytes]
    if seed is not None:
        memory.random_(generator=torch.Generator().manual_seed(seed))
    return memory


def file_bytes(directory: Path, name: str) -> int:
    """The space on disk of the file of this name, in a directory with scratch folders."""
    (found,) = directory.rglob(f"*-{name}")
    return found.stat().st_blocks * 512


def make_engine(name: str, num_disks: int = 1) -> Engine:
    """Skips the test where the engine does not work."""
    if name == "threads":
        return ThreadEngine(num_disks)
    try:
        return RingEngine(num_disks)
    except (ImportError, OSError) as error:
        pytest.skip(f"no io_uring here: {error}")


class Faults:
    """Spoils the next transfers of an engine in one direction, each by one of `results`.

    None leaves a transfer alone, a number of whole sectors makes it really move no more, any other number is what the
    system answers: bytes moved or, if negative, an errno.
    """

    def __init__(self, engine: Engine, *, write: bool, results: list[int | None]):
        self.results = list(results)
        self.answers: dict[int, int] = {}  # of a ring, by tag
        if isinstance(engine, ThreadEngine):
            name = "pwritev" if write else "preadv"
            self.call = getattr(engine, name)
            setattr(engine, name, self.spoiled_call)
        else:
            assert isinstance(engine, RingEngine)
            ring = engine.write_ring if write else engine.read_ring
            self.put, self.finished = ring.put, ring.await_completions
            ring.put, ring.await_completions = self.spoiled_put, self.spoiled_finished  # type: ignore[method-assign]

    def next(self) -> tuple[int | None, int | None]:
        """The length of the next transfer and its answer, None for each that is left alone."""
        result = self.results.pop(0) if self.results else None
        return (result, None) if result is not None and result > 0 and result % 512 == 0 else (None, result)

    def spoiled_call(self, fd: int, memories: list[memoryview], position: int) -> int:
        length, answer = self.next()
        if answer is not None and answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        moved = self.call(fd, [memories[0][:length]], position)
        return moved if answer is None else answer

    def spoiled_put(self, tag: int, fd: int, memory: memoryview, position: int, *, write: bool) -> None:
        length, answer = self.next()
        if answer is not None:
            self.answers[tag] = answer
        self.put(tag, fd, memory[:length], position, write=write)

    def spoiled_finished(self) -> list[tuple[int, int]]:
        return [(tag, self.answers.pop(tag, result)) for tag, result in self.finished()]


EIO, ENOSPC, EINTR = -errno.EIO, -errno.ENOSPC, -errno.EINTR
