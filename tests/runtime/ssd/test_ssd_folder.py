"""Folders of scratch files: private, reserved before the run, refused where they cannot work, gone afterwards."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.ir.errors import DoesNotFit, HardwareError, SsdError
from penstock.runtime.ssd import direct_io
from penstock.runtime.ssd import folder as ssd_folder
from penstock.runtime.ssd.folder import SsdFolder
from penstock.tests.runtime.ssd.on_disk import PAGE, aligned_memory, directories, make_engine

OTHER_JOB = """
import sys, torch
from penstock.runtime.ssd.folder import SsdFolder
folder = SsdFolder([sys.argv[1]], "gpu1")
file = folder.reserve("stage0.weights", 4096)
memory = torch.zeros(8192, dtype=torch.uint8)
memory = memory[-memory.data_ptr() % 4096 :][:4096]
file.write(0, memory.fill_(7))
print(file.stripes[0].path, flush=True)
sys.stdin.readline()
file.read(0, memory.zero_())
print(int(memory.sum()), flush=True)
"""


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return directories(tmp_path)[0]


def folders_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("penstock-*"))


def start_other_job(directory: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder in `directory`, and its file."""
    job = subprocess.Popen(
        [sys.executable, "-c", OTHER_JOB, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    return job, Path(job.stdout.readline().strip())


@pytest.mark.slow
@pytest.mark.multi
def test_two_jobs_share_a_directory_and_the_next_start_clears_up_after_a_crash(disk: Path) -> None:
    ends, ends_file = start_other_job(disk)
    dies, dies_file = start_other_job(disk)
    mine = SsdFolder([disk], "gpu0")
    assert ends_file.exists() and dies_file.exists() and len(folders_in(disk)) == 3
    dies.send_signal(signal.SIGKILL)
    dies.wait()
    assert dies_file.exists()
    third = SsdFolder([disk], "gpu0")
    assert not dies_file.parent.exists()
    assert ends_file.exists() and len(folders_in(disk)) == 3
    out, _ = ends.communicate("go on\n", timeout=60)  # what it wrote is still there; it never closes its folder
    assert out.split() == [str(7 * PAGE)] and ends.returncode == 0
    assert not ends_file.parent.exists()
    mine.close()
    third.close()
    assert not list(disk.iterdir())


def test_everything_is_private_whatever_the_umask(disk: Path) -> None:
    before = os.umask(0)
    try:
        folder = SsdFolder([disk], "gpu0")
        file = folder.reserve("stage1.states", PAGE)
    finally:
        os.umask(before)
    path = Path(file.stripes[0].path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.parent.parent == disk and re.fullmatch(r"penstock-[0-9a-f]{16}-gpu0", path.parent.name)
    folder.close()


def test_space_is_taken_when_it_is_reserved(disk: Path) -> None:
    folder = SsdFolder([disk], "gpu0")
    file = folder.reserve("stage1.states", 1 << 20)
    assert os.stat(file.stripes[0].path).st_blocks * 512 >= 1 << 20
    folder.close()
    folder.close()
    assert not list(disk.iterdir())


def test_names_of_files_may_hold_anything(disk: Path) -> None:
    folder = SsdFolder([disk], "gpu0")
    for name in ("a/../../b", "a/../../b", "h.3 mlp\0", "x" * 1000, ""):
        file = folder.reserve(name, PAGE)
        assert file.name == name
        assert Path(file.stripes[0].path).parent == folders_in(disk)[0]
    assert len(files_in([disk])) == 5
    folder.close()


def test_an_empty_file_takes_nothing(disk: Path) -> None:
    folder = SsdFolder([disk], "gpu0")
    file = folder.reserve("nothing", 0)
    file.write(0, aligned_memory(0))
    file.read(0, aligned_memory(0))
    assert file.num_bytes == 0
    folder.close()


def test_a_forked_process_leaves_its_parents_files(disk: Path) -> None:
    folder = SsdFolder([disk], "gpu0", engine="threads")
    child = os.fork()
    if child == 0:
        folder.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(folders_in(disk)) == 1
    folder.close()


# Directories and engines that do not work


def refusal(*paths: Path | str, **options: Any) -> str:
    with pytest.raises(HardwareError) as caught:
        SsdFolder(list(paths), "gpu0", **options)
    for path in paths[-1:]:
        assert str(path) in str(caught.value)
    return str(caught.value)


def test_directories_that_cannot_work_are_named_with_a_way_out(disk: Path) -> None:
    (disk / "file").write_text("")
    assert "does not exist" in refusal(disk, disk / "missing")
    assert "is a file, not a directory" in refusal(disk / "file")
    assert "Not a directory" in refusal(disk / "file" / "below")
    assert "cannot be written" in refusal("/sys")
    assert "none given" in refusal()
    text = refusal(disk / "missing")
    assert "Name a directory on an SSD that this user may write" in text
    assert not folders_in(disk)


def test_the_same_directory_twice_is_refused_under_any_name(disk: Path) -> None:
    (disk.parent / "link").symlink_to(disk)
    for other in (disk, f"{disk}/../{disk.name}", disk.parent / "link"):
        assert f"is the same as {disk}" in refusal(disk, other)
    assert not folders_in(disk)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_directories_in_memory_are_refused(disk: Path) -> None:
    assert "is in memory (tmpfs), not on a disk" in refusal(disk, "/dev/shm")
    assert not folders_in(Path("/dev/shm")) and not folders_in(disk)


@pytest.mark.parametrize("at", ["open", "pwritev"])
def test_file_systems_without_direct_access_are_refused(disk: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    """Some refuse when a file is opened, others when it is written."""
    real_open = os.open

    def no_direct(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *args, **named)

    def no_write(*args: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, at, no_direct if at == "open" else no_write)
    text = refusal(disk)
    assert "refuses O_DIRECT" in text and "ext4, xfs or btrfs" in text
    assert not folders_in(disk)


def test_without_the_wheel_threads_are_taken_and_the_reason_is_kept(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = importlib.import_module

    def no_wheel(name: str) -> Any:
        if name == "liburing":
            raise ImportError("No module named 'liburing'")
        return real_import(name)

    monkeypatch.setattr(importlib, "import_module", no_wheel)
    folder = SsdFolder([disk], "gpu0")
    assert folder.engine == "threads" and "No module named 'liburing'" in folder.engine_note
    folder.close()
    with pytest.raises(HardwareError, match=r'io_uring does not work here.*Ask for "threads"'):
        SsdFolder([disk], "gpu0", engine="io_uring")
    assert not folders_in(disk)


def test_a_wheel_that_kills_its_process_is_tried_in_another(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one that was built for AVX-512 does on processors without."""
    monkeypatch.setattr(direct_io, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    direct_io.why_no_ring.cache_clear()
    try:
        folder = SsdFolder([disk], "gpu0")
        assert folder.engine == "threads"
        assert "the wheel liburing dies on this processor (SIGILL)" in folder.engine_note
        folder.close()
        with pytest.raises(HardwareError, match=r'dies on this processor.*Ask for "threads"'):
            SsdFolder([disk], "gpu0", engine="io_uring")
    finally:
        direct_io.why_no_ring.cache_clear()


def test_a_kernel_that_forbids_rings_or_answers_wrongly_is_found_out(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine("io_uring").close()

    def forbid(self: Any, depth: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(direct_io.Ring, "__init__", forbid)
        folder = SsdFolder([disk], "gpu0")
    assert folder.engine == "threads" and "not permitted" in folder.engine_note
    folder.close()
    with monkeypatch.context() as patch:
        patch.setattr(direct_io.Ring, "put", lambda ring, tag, *_, write: ring._flying.add(tag))  # moves nothing
        patch.setattr(direct_io.Ring, "await_completions", lambda ring: [(ring._flying.pop(), PAGE)])
        folder = SsdFolder([disk], "gpu0")
    assert folder.engine == "threads"
    folder.close()


def test_auto_takes_the_ring_where_it_works(disk: Path) -> None:
    make_engine("io_uring").close()
    options: dict[str, Any]
    folder = SsdFolder([disk], "gpu0")
    assert (folder.engine, folder.engine_note) == ("io_uring", "")
    folder.close()
    for options in ({"engine": "threads"}, {"verify": True}):
        folder = SsdFolder([disk], "gpu0", **options)
        assert folder.engine == "threads" and folder.engine_note
        folder.close()
    with pytest.raises(HardwareError, match="one of auto, io_uring, threads"):
        SsdFolder([disk], "gpu0", engine="mmap")


# Full disks


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[SsdFolder, list[Path]]]:
    """A folder over two directories on one file system, in chunks of a page."""
    places = directories(tmp_path, 2)
    folder = SsdFolder(places, "gpu0", chunk_bytes=PAGE)
    yield folder, places
    folder.close()


def files_in(places: list[Path]) -> list[Path]:
    return [path for place in places for path in place.glob("penstock-*/[!.]*")]


def test_directories_on_one_file_system_share_its_room(
    two: tuple[SsdFolder, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, places = two
    monkeypatch.setattr(ssd_folder, "free_space", lambda directory: 15 * PAGE)
    folder.reserve("fits", 15 * PAGE)
    before = files_in(places)
    with pytest.raises(DoesNotFit, match=f"{PAGE} bytes are missing") as caught:
        folder.reserve("stage1.states", 16 * PAGE)  # 8 pages in each would fit alone
    assert caught.value.missing_bytes == PAGE
    assert caught.value.memory.startswith("ssd") and all(str(place) in caught.value.memory for place in places)
    assert files_in(places) == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_half_made(
    two: tuple[SsdFolder, list[Path]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder, places = two
    kept = folder.reserve("first", PAGE)
    kept.write(0, aligned_memory(PAGE, seed=1))
    before = files_in(places)
    calls: list[int] = []

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))

    open_before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fallocate)
        with pytest.raises(SsdError if number == errno.EFBIG else DoesNotFit, match="stage1"):
            folder.reserve("stage1.states", 8 * PAGE)
    assert files_in(places) == before and len(os.listdir("/proc/self/fd")) == open_before
    into = aligned_memory(PAGE)
    kept.read(0, into)
    assert torch.equal(into, aligned_memory(PAGE, seed=1))
    folder.reserve("stage1.states", 8 * PAGE).write(0, aligned_memory(8 * PAGE))


FULL_DISK = """
import sys
from pathlib import Path
from penstock.ir.errors import DoesNotFit
from penstock.runtime.ssd.folder import SsdFolder, free_space
place = Path(sys.argv[1])
folder = SsdFolder([place], "gpu0")
free_bytes = free_space(place) // 4096 * 4096
try:
    folder.reserve("stage1.states", free_bytes + 4096)
except DoesNotFit as error:
    print(error.missing_bytes == free_bytes + 4096 - free_space(place), len(list(place.glob("penstock-*/[!.]*"))))
folder.reserve("stage1.states", free_bytes // 2)
"""


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file as a disk takes root")
def test_a_real_disk_that_is_too_small(tmp_path: Path) -> None:
    image, place = tmp_path / "image", tmp_path / "mounted"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
    # The mount lives in a name space of its own and vanishes with the process.
    mount = f'mount -o loop "{image}" "{place}" || exit 77; exec "{sys.executable}" -c "$1" "{place}"'
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", mount, "bash", FULL_DISK], capture_output=True, text=True
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "0"]
