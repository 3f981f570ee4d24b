"""A striped scratch file behaves like one array of bytes, and says so when it cannot."""

from __future__ import annotations

import gc
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.ir.errors import SsdError
from penstock.runtime.ssd.checksums import PageSums
from penstock.runtime.ssd.file import Regions, SsdFile
from penstock.runtime.ssd.folder import SsdFolder
from penstock.tests.runtime.ssd.on_disk import EIO, ENOSPC, PAGE, Faults, aligned_memory, directories, make_engine
from penstock.tests.shown_elsewhere import slow_but

CHUNK = 4 * PAGE
Make = Callable[..., SsdFolder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes folders over `count` new directories, with chunks of four pages."""
    made: list[SsdFolder] = []

    def folder(count: int = 1, **options: object) -> SsdFolder:
        place = tmp_path / str(len(made))
        place.mkdir()
        if options.get("engine") == "io_uring":
            make_engine("io_uring").close()
        made.append(SsdFolder(directories(place, count), "cpu0", chunk_bytes=CHUNK, **options))  # type: ignore[arg-type]
        return made[-1]

    yield folder
    for each in made:
        each.close()


def fill(folder: SsdFolder, num_bytes: int, seed: int = 1) -> tuple[SsdFile, torch.Tensor]:
    file, contents = folder.reserve("stage1.states", num_bytes), aligned_memory(num_bytes, seed)
    file.write(0, contents)
    return file, contents


def flip_bit(file: SsdFile, stripe: int, position: int, bit: int = 0) -> None:
    with open(file.stripes[stripe].path, "r+b") as raw:
        raw.seek(position)
        byte = raw.read(1)[0]
        raw.seek(position)
        raw.write(bytes([byte ^ 1 << bit]))


moves = st.lists(st.tuples(st.booleans(), st.integers(0, 39), st.integers(1, 40)), min_size=1, max_size=12)


@pytest.mark.hypothesis
@pytest.mark.parametrize("count", slow_but([1, 3], [1, 2, 3]))
@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_regions_read_as_written_over_any_number_of_disks(make: Make, count: int, engine: str) -> None:
    """Against a model: one array of bytes and one of which of them were ever written."""
    folder = make(count, engine=engine, verify=True)

    @settings(max_examples=40, deadline=None)
    @given(moves=moves, size=st.integers(1, 40), seed=st.integers(0, 2**30))
    def check(moves: list[tuple[bool, int, int]], size: int, seed: int) -> None:
        file = folder.reserve(f"file{seed}", size * PAGE)
        model, known = bytearray(size * PAGE), [False] * size
        for number, (write, begin, length) in enumerate(moves):
            begin %= size
            end = min(begin + length, size)
            memory = aligned_memory((end - begin) * PAGE, seed + number)
            if write:
                file.write(begin * PAGE, memory)
                model[begin * PAGE : end * PAGE] = memory.numpy().tobytes()
                known[begin:end] = [True] * (end - begin)
            elif all(known[begin:end]):
                file.read(begin * PAGE, memory)
                assert memory.numpy().tobytes() == model[begin * PAGE : end * PAGE]
            else:
                with pytest.raises(SsdError, match="never written") as caught:
                    file.read(begin * PAGE, memory)
                assert caught.value.offset_bytes == known.index(False, begin) * PAGE

    check()


def test_chunks_go_round_robin_and_files_begin_on_different_disks(make: Make) -> None:
    folder = make(3)
    for number in range(3):
        file, contents = fill(folder, 7 * CHUNK + PAGE, seed=number)
        chunks = [contents[at : at + CHUNK].numpy().tobytes() for at in range(0, len(contents), CHUNK)]
        for stripe in range(3):
            mine = chunks[(stripe - number) % 3 :: 3]
            assert Path(file.stripes[stripe].path).read_bytes() == b"".join(mine)


def test_a_file_written_whole_is_read_in_parts_and_counted(make: Make) -> None:
    """Weights, masters and states are stored one after the other; masters and states are read without the weights."""
    folder = make(2, verify=True)
    file, contents = fill(folder, 15 * PAGE)
    for begin, end in ((3, 15), (0, 3), (4, 5)):
        into = aligned_memory((end - begin) * PAGE)
        file.read(begin * PAGE, into)
        assert torch.equal(into, contents[begin * PAGE : end * PAGE])
    assert (folder.written_bytes, folder.read_bytes) == (15 * PAGE, 16 * PAGE)


def test_sizes_are_rounded_up_to_pages(make: Make) -> None:
    file = make().reserve("odd", 3 * PAGE + 1)
    assert file.num_bytes == 4 * PAGE
    assert Path(file.stripes[0].path).stat().st_size == 4 * PAGE


@pytest.mark.parametrize("verify", [False, True])
def test_what_was_never_written_cannot_be_read(make: Make, verify: bool) -> None:
    file = make(verify=verify).reserve("stage1.states", 10 * PAGE)
    file.write(2 * PAGE, aligned_memory(3 * PAGE, seed=1))
    with pytest.raises(SsdError, match=r"stage1\.states: byte 20480 was never written") as caught:
        file.read(2 * PAGE, aligned_memory(4 * PAGE))
    assert caught.value.offset_bytes == 5 * PAGE and caught.value.file == file.stripes[0].path


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_failed_write_leaves_a_hole_until_it_is_repeated(make: Make, engine: str) -> None:
    folder = make(2, engine=engine)
    file, contents = fill(folder, 8 * CHUNK)
    Faults(file._home.engine, write=True, results=[None, ENOSPC])
    with pytest.raises(SsdError, match="No space left on device"):
        file.write(CHUNK, contents[: 2 * CHUNK])
    with pytest.raises(SsdError, match="never written"):
        file.read(0, aligned_memory(8 * CHUNK))
    into = aligned_memory(CHUNK)
    file.read(3 * CHUNK, into)
    assert torch.equal(into, contents[3 * CHUNK : 4 * CHUNK])
    file.write(CHUNK, contents[CHUNK : 3 * CHUNK])
    into = aligned_memory(8 * CHUNK)
    file.read(0, into)
    assert torch.equal(into, contents) and folder.written_bytes == 10 * CHUNK


def test_a_failed_read_can_be_repeated(make: Make) -> None:
    folder = make()
    file, contents = fill(folder, 2 * CHUNK)
    Faults(file._home.engine, write=False, results=[EIO])
    into = aligned_memory(2 * CHUNK)
    with pytest.raises(SsdError, match="Input/output error"):
        file.read(0, into)
    assert folder.read_bytes == 0
    file.read(0, into)
    assert torch.equal(into, contents)


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_flipped_bit_is_found_and_named(make: Make, engine: str) -> None:
    file, contents = fill(make(2, engine=engine, verify=True), 6 * CHUNK)
    flip_bit(file, stripe=1, position=CHUNK + PAGE + 5, bit=7)  # in chunk 3, its second page
    with pytest.raises(
        SsdError, match=rf"4096 bytes from {CHUNK + PAGE} on \(in chunk 3 of stage1\.states\)"
    ) as caught:
        file.read(0, aligned_memory(6 * CHUNK))
    assert caught.value.file == file.stripes[1].path and caught.value.offset_bytes == 3 * CHUNK + PAGE
    into = aligned_memory(3 * CHUNK + PAGE)
    file.read(0, into)  # the page before it is whole
    assert torch.equal(into, contents[: len(into)])
    file.write(3 * CHUNK, contents[3 * CHUNK : 4 * CHUNK])
    file.read(0, aligned_memory(6 * CHUNK))


def test_without_verify_a_flipped_bit_goes_through(make: Make) -> None:
    file, contents = fill(make(), CHUNK)
    flip_bit(file, stripe=0, position=0)
    into = aligned_memory(CHUNK)
    file.read(0, into)
    assert into[0] == contents[0] ^ 1 and torch.equal(into[1:], contents[1:])


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_one_thread_reads_while_another_writes(make: Make, engine: str) -> None:
    file, contents = fill(make(2, engine=engine, verify=True), 64 * CHUNK)
    half, failures = 32 * CHUNK, []

    def write() -> None:
        try:
            for _ in range(10):
                file.write(half, contents[half:])
        except Exception as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    into = aligned_memory(half)
    for _ in range(10):
        into.zero_()
        file.read(0, into)
        assert torch.equal(into, contents[:half])
    writer.join()
    assert not failures
    file.read(half, into)
    assert torch.equal(into, contents[half:])


@pytest.mark.parametrize("move", ["read", "write"])
def test_bounds_and_alignment_are_demanded(make: Make, move: str) -> None:
    call = getattr(fill(make(), 4 * PAGE)[0], move)
    for offset, memory in (
        (0, aligned_memory(4 * PAGE)[1:]),
        (0, aligned_memory(PAGE)[: PAGE // 2]),
        (512, aligned_memory(PAGE)),
        (PAGE, aligned_memory(4 * PAGE)),
        (-PAGE, aligned_memory(PAGE)),
        (0, aligned_memory(4 * PAGE).view(torch.float32)),
        (0, aligned_memory(4 * PAGE).view(2, -1)),
    ):
        with pytest.raises(AssertionError, match=r"stage1\.states"):
            call(offset, memory)


def test_a_closed_folder_refuses(make: Make) -> None:
    folder = make()
    file, contents = fill(folder, PAGE)
    folder.close()
    for call in (file.read, file.write):
        with pytest.raises(SsdError, match="the folder was closed"):
            call(0, contents)
    with pytest.raises(SsdError, match="after the folder was closed"):
        folder.reserve("late", PAGE)


@pytest.mark.slow
def test_files_outlive_a_folder_that_nobody_holds(tmp_path: Path) -> None:
    directory = directories(tmp_path)[0]
    file, contents = fill(SsdFolder([directory], "cpu0"), PAGE)
    gc.collect()
    into = aligned_memory(PAGE)
    file.read(0, into)
    assert torch.equal(into, contents)
    del file
    gc.collect()
    assert not list(directory.iterdir())


def test_a_file_that_someone_removed_still_reads(make: Make) -> None:
    folder = make()
    file, contents = fill(folder, PAGE)
    shutil.rmtree(Path(file.stripes[0].path).parent)
    into = aligned_memory(PAGE)
    file.read(0, into)
    assert torch.equal(into, contents)
    folder.close()


ranges = st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 10)), max_size=20)


@given(ranges=ranges, begin=st.integers(0, 40), length=st.integers(0, 12))
def test_regions_are_a_set(ranges: list[tuple[bool, int, int]], begin: int, length: int) -> None:
    regions, model = Regions(), set()
    for add, low, count in ranges:
        if add:
            regions.add(low, low + count)
            model |= set(range(low, low + count))
        else:
            regions.remove(low, low + count)
            model -= set(range(low, low + count))
    assert regions.first_hole(begin, begin + length) == next(
        (n for n in range(begin, begin + length) if n not in model), None
    )
    borders = [border for pair in zip(regions._begins, regions._ends, strict=True) for border in pair]
    assert borders == sorted(set(borders))  # neighbours are one range: few ranges, however often they are written


def test_checksums_see_every_flipped_bit_and_pairs_of_high_bits() -> None:
    page = np.random.default_rng(0).integers(0, 256, PAGE, dtype=np.uint8)
    sums = PageSums(3 * PAGE)
    sums.put(PAGE, page.data)
    assert sums.wrong_page(PAGE, page.data) is None
    chosen = random.Random(0)
    flips = [(chosen.randrange(PAGE), chosen.randrange(8)) for _ in range(500)]
    pairs = [((8 * word + 7, 7), (8 * chosen.randrange(word) + 7, 7)) for word in range(1, 200)]  # two signs of doubles
    for changed in [*((flip,) for flip in flips), *pairs]:
        spoiled = page.copy()
        for byte, bit in changed:
            spoiled[byte] ^= 1 << bit
        assert sums.wrong_page(PAGE, spoiled.data) == PAGE
    both = np.concatenate([page, np.roll(page, 4)])  # the same words elsewhere in the page
    sums.put(PAGE, np.concatenate([page, page]).data)
    assert sums.wrong_page(PAGE, both.data) == 2 * PAGE
