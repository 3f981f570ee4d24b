"""Transfers past the page cache: both engines move the right bytes, whatever the disk answers."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.ir.errors import SsdError
from penstock.runtime.ssd.direct_io import IN_FLIGHT, Engine, Piece, ThreadEngine
from penstock.tests.runtime.ssd.on_disk import (
    EINTR,
    EIO,
    ENOSPC,
    PAGE,
    Faults,
    aligned_memory,
    directories,
    make_engine,
)

SIZE = 16 * PAGE


class DirectFile:
    """A file of `SIZE` bytes with random contents."""

    def __init__(self, path: Path):
        self.path = path
        self.contents = aligned_memory(SIZE, seed=1)
        path.write_bytes(self.contents.numpy().tobytes())
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)

    def pieces(self, memory: Tensor, length: int) -> list[Piece]:
        view = memory.numpy().data
        starts = range(0, len(memory), length)
        return [Piece(self.fd, at, view[at : at + length], str(self.path), at) for at in starts]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    made = DirectFile(directories(tmp_path)[0] / "file")
    yield made
    os.close(made.fd)


@pytest.fixture(params=["threads", "io_uring"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    made = make_engine(request.param)
    yield made
    made.close()


def test_pieces_are_written_and_read(engine: Engine, file: DirectFile) -> None:
    into = aligned_memory(SIZE)
    engine.read(file.pieces(into, PAGE), None)
    assert torch.equal(into, file.contents)
    source = aligned_memory(SIZE, seed=2)
    engine.write(file.pieces(source, 3 * PAGE), None)
    assert file.path.read_bytes() == source.numpy().tobytes()
    engine.read([])
    engine.write([])


def test_short_and_interrupted_transfers_are_continued(engine: Engine, file: DirectFile) -> None:
    # An interrupted system call is repeated by Python itself; a ring reports it.
    results = [PAGE, 2 * PAGE + 512, None, 512] + ([] if isinstance(engine, ThreadEngine) else [EINTR, PAGE, EINTR])
    read, write = Faults(engine, write=False, results=results), Faults(engine, write=True, results=results)
    into = aligned_memory(SIZE)
    engine.read(file.pieces(into, 8 * PAGE))
    assert torch.equal(into, file.contents)
    source = aligned_memory(SIZE, seed=2)
    engine.write(file.pieces(source, 8 * PAGE))
    assert file.path.read_bytes() == source.numpy().tobytes()
    assert not read.results and not write.results


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize(
    ("results", "number", "text"),
    [
        ([EIO], errno.EIO, "Input/output error"),
        ([None, None, ENOSPC], errno.ENOSPC, "The disk is full, although the space was reserved"),
        ([512, 0], None, "the file ends there"),
        ([700, 100], None, "100 bytes were"),
    ],
    ids=["EIO", "ENOSPC", "nothing", "less than a sector"],
)
def test_failures_name_the_file_and_the_place(
    engine: Engine, file: DirectFile, write: bool, results: list[int | None], number: int | None, text: str
) -> None:
    Faults(engine, write=write, results=results)
    pieces = file.pieces(aligned_memory(SIZE), 4 * PAGE)
    with pytest.raises(SsdError, match=text) as caught:
        (engine.write if write else engine.read)(pieces if len(results) > 2 else pieces[1:2])
    assert str(file.path) in str(caught.value) and caught.value.file == str(file.path)
    assert caught.value.errno == number
    if len(results) < 3:
        assert caught.value.offset_bytes == 4 * PAGE + (512 if number is None else 0)
    engine.read(pieces)  # the engine works on


def test_reading_behind_the_end_of_a_file_is_an_error(engine: Engine, file: DirectFile) -> None:
    os.truncate(file.path, 3 * PAGE + 100)
    with pytest.raises(SsdError, match="the file ends there"):
        engine.read(file.pieces(aligned_memory(SIZE), 8 * PAGE))


def test_checks_see_each_piece_and_their_errors_come_through(engine: Engine, file: DirectFile) -> None:
    into, seen = aligned_memory(SIZE), []

    def check(piece: Piece) -> None:
        begin = piece.offset_bytes
        assert bytes(piece.memory) == file.contents[begin : begin + len(piece.memory)].numpy().tobytes()
        seen.append(begin)

    engine.read(file.pieces(into, 2 * PAGE), check)
    assert sorted(seen) == list(range(0, SIZE, 2 * PAGE))

    def refuse(piece: Piece) -> None:
        if piece.offset_bytes == 0:
            raise ValueError("not these bytes")

    for move in (engine.read, engine.write):
        with pytest.raises(ValueError, match="not these bytes"):
            move(file.pieces(into, PAGE), refuse)
    assert file.path.read_bytes() == file.contents.numpy().tobytes()


def test_several_pieces_are_under_way_at_once(file: DirectFile) -> None:
    engine = ThreadEngine(1)
    together = threading.Barrier(IN_FLIGHT, timeout=20)

    def preadv(*args: object) -> int:
        together.wait()
        return os.preadv(*args)  # type: ignore[arg-type]

    engine.preadv = preadv
    into = aligned_memory(SIZE)
    engine.read(file.pieces(into, PAGE))
    assert torch.equal(into, file.contents)
    engine.close()


def test_a_read_does_not_wait_for_a_slow_write(file: DirectFile) -> None:
    engine = ThreadEngine(1)
    go_on = threading.Event()

    def pwritev(*args: object) -> int:
        assert go_on.wait(20)
        return os.pwritev(*args)  # type: ignore[arg-type]

    engine.pwritev = pwritev
    writer = threading.Thread(target=engine.write, args=(file.pieces(file.contents, PAGE),))
    writer.start()
    into = aligned_memory(SIZE)
    engine.read(file.pieces(into, PAGE))
    assert torch.equal(into, file.contents) and writer.is_alive()
    go_on.set()
    writer.join()
    engine.close()


def test_nothing_touches_the_memory_after_a_failure(file: DirectFile) -> None:
    engine = ThreadEngine(1)
    done = []

    def preadv(fd: int, memories: list[memoryview], position: int) -> int:
        if position == 0:
            raise OSError(errno.EIO, "failed at once")
        time.sleep(0.05)
        done.append(os.preadv(fd, memories, position))
        return done[-1]

    engine.preadv = preadv
    with pytest.raises(SsdError):
        engine.read(file.pieces(aligned_memory(SIZE), PAGE))
    at_return = len(done)
    time.sleep(0.1)
    assert len(done) == at_return < SIZE // PAGE - 1  # those that had not begun never did
    engine.close()


def test_a_ring_has_nothing_under_way_after_a_failure(file: DirectFile) -> None:
    """The second piece comes from a pipe, so it takes until someone writes there."""
    engine = make_engine("io_uring")
    Faults(engine, write=False, results=[EIO])
    source, sink = os.pipe()
    fails, waits = file.pieces(aligned_memory(2 * PAGE), PAGE)
    failures: list[SsdError] = []

    def read() -> None:
        with pytest.raises(SsdError) as caught:
            engine.read([fails, dataclasses.replace(waits, fd=source)])
        failures.append(caught.value)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    os.write(sink, b"x" * PAGE)
    reader.join(20)
    assert failures[0].errno == errno.EIO and bytes(waits.memory) == b"x" * PAGE
    engine.close()
    os.close(source)
    os.close(sink)


def test_a_ring_lets_go_of_the_memory(file: DirectFile) -> None:
    engine = make_engine("io_uring")
    memory = mmap.mmap(-1, PAGE)
    with memoryview(memory) as view:
        engine.read([Piece(file.fd, PAGE, view, str(file.path), PAGE)])
        assert bytes(view) == file.contents[PAGE : 2 * PAGE].numpy().tobytes()
    memory.close()  # BufferError if anyone held it
    engine.close()
