"""Pages that the user's files have are read there, until a scratch file gets other contents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.ir.errors import DoesNotFit, SsdError
from penstock.runtime.ssd import folder as ssd_folder
from penstock.runtime.ssd.extents import FileRange
from penstock.runtime.ssd.file import SsdFile
from penstock.runtime.ssd.folder import SsdFolder
from penstock.tests.runtime.ssd.on_disk import PAGE, aligned_memory, directories, make_engine

CHUNK = 4 * PAGE
HEADER = 1003  # bytes before the first tensor, so that no page of the file begins one of the scratch file
PAGES = 24


@pytest.fixture
def weights(tmp_path: Path) -> Tensor:
    """The content of `weights.bin` after its header."""
    contents = aligned_memory(PAGES * PAGE, seed=3)
    (tmp_path / "weights.bin").write_bytes(bytes(HEADER) + contents.numpy().tobytes())
    return contents


@pytest.fixture(params=["threads", "io_uring"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[SsdFolder]:
    make_engine(request.param).close()
    found = SsdFolder(directories(tmp_path), "cpu0", chunk_bytes=CHUNK, engine=request.param)
    yield found
    found.close()


def range_of(tmp_path: Path, begin: int, end: int) -> FileRange:
    """The bytes of the weights between two places."""
    return FileRange(str(tmp_path / "weights.bin"), HEADER + begin, end - begin)


def file_with(folder: SsdFolder, tmp_path: Path, *ranges: tuple[int, int]) -> SsdFile:
    """A file as long as the weights, which has these ranges of them in their places."""
    return folder.reserve("stage1", PAGES * PAGE, [(begin, range_of(tmp_path, begin, end)) for begin, end in ranges])


def contents_of(file: SsdFile) -> Tensor:
    found = aligned_memory(file.num_bytes)
    file.read(0, found)
    return found


def taken_bytes(file: SsdFile) -> int:
    return sum(os.fstat(stripe.fd).st_blocks * 512 for stripe in file.stripes)


def test_equal_contents_are_read_in_place_and_take_no_space(folder: SsdFolder, weights: Tensor, tmp_path: Path) -> None:
    """A tensor that begins and ends inside of pages shares these with others, which are written."""
    file = file_with(folder, tmp_path, (100, 10 * PAGE + 5), (12 * PAGE, PAGES * PAGE))
    assert taken_bytes(file) == 3 * PAGE
    file.write(0, weights)
    assert folder.written_bytes == taken_bytes(file) == 3 * PAGE
    assert torch.equal(contents_of(file), weights)
    assert folder.read_bytes == PAGES * PAGE


def test_a_disk_needs_room_for_the_rest_alone(
    folder: SsdFolder, weights: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_folder, "free_space", lambda directory: 3 * PAGE)
    file_with(folder, tmp_path, (100, 10 * PAGE + 5), (12 * PAGE, PAGES * PAGE))
    with pytest.raises(DoesNotFit, match="4096 bytes are missing"):
        file_with(folder, tmp_path, (100, 10 * PAGE - 5), (12 * PAGE, PAGES * PAGE))


def test_other_contents_are_written_beside(folder: SsdFolder, weights: Tensor, tmp_path: Path) -> None:
    before = (tmp_path / "weights.bin").read_bytes()
    file = file_with(folder, tmp_path, (0, PAGES * PAGE))
    other = aligned_memory(PAGES * PAGE).copy_(weights)
    other[9 * PAGE + 17] ^= 1
    file.write(8 * PAGE, other[8 * PAGE : 10 * PAGE])
    assert torch.equal(contents_of(file), other)
    assert taken_bytes(file) == 2 * PAGE
    assert (tmp_path / "weights.bin").read_bytes() == before


def test_a_file_that_is_written_meanwhile_is_named(folder: SsdFolder, weights: Tensor, tmp_path: Path) -> None:
    file = file_with(folder, tmp_path, (0, PAGES * PAGE))
    path = tmp_path / "weights.bin"
    with path.open("ab") as users:
        users.write(b"more")
    with pytest.raises(SsdError, match=rf"{path}: was written after the job began"):
        contents_of(file)


@pytest.mark.parametrize("other", ["verify", "two disks", "in memory", "missing"])
def test_all_is_copied_where_nothing_can_stay(other: str, weights: Tensor, tmp_path: Path) -> None:
    disks = directories(tmp_path, 2 if other == "two disks" else 1)
    found = range_of(tmp_path, 0, PAGES * PAGE)
    if other == "in memory":
        found = FileRange("/dev/shm", 0, PAGES * PAGE)
    if other == "missing":
        (tmp_path / "weights.bin").unlink()
    folder = SsdFolder(disks, "cpu0", chunk_bytes=CHUNK, engine="threads", verify=other == "verify")
    try:
        file = folder.reserve("stage1", PAGES * PAGE, [(0, found)])
        assert taken_bytes(file) == PAGES * PAGE
        with pytest.raises(SsdError, match="never written"):
            contents_of(file)
    finally:
        folder.close()


places = st.integers(0, PAGES)
regions = st.tuples(places, places).map(sorted).filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=40, deadline=None)
@given(
    borders=st.lists(st.integers(0, PAGES * PAGE), max_size=8, unique=True).map(sorted),
    writes=st.lists(st.tuples(regions, st.booleans()), max_size=5),
)
def test_a_file_reads_as_an_array_of_bytes(
    borders: list[int], writes: list[tuple[tuple[int, int], bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With any parts of it in the user's file, and any writes over them."""
    place = tmp_path_factory.mktemp("random")
    wanted = aligned_memory(PAGES * PAGE, seed=4)
    (place / "weights.bin").write_bytes(bytes(HEADER) + wanted.numpy().tobytes())
    folder = SsdFolder(directories(place), "cpu0", chunk_bytes=CHUNK, engine="threads")
    try:
        file = file_with(folder, place, *zip(borders[::2], borders[1::2]))
        file.write(0, wanted)
        for number, ((first, last), is_same) in enumerate(writes):
            region, held = wanted[first * PAGE : last * PAGE], aligned_memory((last - first) * PAGE, seed=number)
            (held if is_same else region).copy_(region if is_same else held)
            file.write(first * PAGE, held)
            assert torch.equal(contents_of(file), wanted)
    finally:
        folder.close()
