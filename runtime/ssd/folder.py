"""The private files of one device's process on one or several SSDs: space reserved before a run, gone after it."""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

from ...ir.errors import DoesNotFit, HardwareError, SsdError
from ...ir.units import format_bytes
from ..scratch import Scratch
from .checksums import PageSums
from .direct_io import ALIGN_BYTES, Engine, Piece, RingEngine, ThreadEngine
from .directory import check_directory, make_folder, no_direct, open_direct
from .extents import Extent, FileRange, OpenFiles
from .file import FolderTraffic, SsdFile, Stripe

ENGINES = ("auto", "io_uring", "threads")


class SsdFolder:
    """Makes `SsdFile`s striped over `directories`, one per SSD, each in a folder `penstock-ID-OWNER` with mode 0700.

    At the start, folders that ended processes of this user left there are removed; see `scratch`. Its own folders are
    removed by `close`, and at the latest when the process ends normally. `verify` keeps checksums of what
    is written (4 bytes per 4096) and compares at each read. `engine` "auto" takes io_uring if it works and `verify` is
    off, else threads; afterwards `engine` is the one that was taken and `engine_note` why it is not io_uring.

    Raises `HardwareError` for a directory that is missing, no directory, not writable, in memory, without O_DIRECT, or
    given twice, and for an engine that does not work here.
    """

    def __init__(
        self,
        directories: Sequence[str | Path],
        owner: str,
        *,
        verify: bool = False,
        engine: str = "auto",
        chunk_bytes: int = 4 << 20,
    ):
        assert chunk_bytes > 0 and chunk_bytes % ALIGN_BYTES == 0, f"chunk_bytes {chunk_bytes}: multiples of 4096"
        if engine not in ENGINES:
            raise HardwareError(f"ssd engine {engine!r}: is not known; one of {', '.join(ENGINES)}.")
        self.directories = different(directories)
        self._folders: list[Scratch] = []
        self._descriptors: list[int] = []
        try:
            for directory in self.directories:
                self._folders.append(make_folder(directory, owner))
            made, self.engine_note = make_engine(engine, [folder.path for folder in self._folders], verify)
        except BaseException:
            _remove(os.getpid(), None, self._folders, self._descriptors)
            raise
        self.engine = made.name
        self._verify = verify
        self._num_files = 0
        self._users = OpenFiles(self.directories[0].stat().st_dev, self._descriptors)
        # Files keep their home, so that the space outlives a folder object that nobody holds any more.
        self._home = FolderTraffic(made, chunk_bytes)
        self._finalizer = weakref.finalize(self._home, _remove, os.getpid(), made, self._folders, self._descriptors)

    @property
    def read_bytes(self) -> int:
        """Bytes read from all files so far."""
        return self._home.read_bytes

    @property
    def written_bytes(self) -> int:
        """Bytes written to all files so far."""
        return self._home.written_bytes

    def reserve(self, name: str, num_bytes: int, in_files: Iterable[tuple[int, FileRange]] = ()) -> SsdFile:
        """A file of `num_bytes`, rounded up to 4096, whose space is taken on the disks now. It holds nothing yet but
        whole pages that the user's files have on its disk, which take no space.

        `in_files`: offsets in the new file, each with the range of a user's file whose bytes begin there. A folder of
        several disks, which read faster than one, and one with `verify`, whose pages all need checksums, ignore them.

        Raises `DoesNotFit` if a disk lacks the room, and then leaves nothing on the disks.
        """
        if self._home.closed:
            raise SsdError(f"{name}: cannot be reserved after the folder was closed.", file=name)
        num_bytes = -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        first = self._num_files % len(self._folders)  # small files spread over the disks too
        sizes = stripe_sizes(num_bytes, len(self._folders), self._home.chunk_bytes, first)
        extents: list[Extent] = []
        if not self._verify and len(self._folders) == 1:
            extents = sorted(self._users.extents(in_files), key=lambda extent: extent.begin)
        self._require_room(name, [size_bytes - sum(map(len, extents)) for size_bytes in sizes])
        file_name = f"{self._num_files}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:100]}"
        stripes: list[Stripe] = []
        try:
            for folder, size_bytes in zip(self._folders, sizes, strict=True):
                path = folder.path / file_name
                stripes.append(Stripe(open_direct(path), str(path)))
                borders = [0, *(border for extent in extents for border in (extent.begin, extent.end)), size_bytes]
                for begin, end in zip(borders[::2], borders[1::2]):
                    self._allocate(name, stripes[-1], begin, end)
        except BaseException:
            for stripe in stripes:
                os.close(stripe.fd)
                os.unlink(stripe.path)
            raise
        self._num_files += 1
        self._descriptors += [stripe.fd for stripe in stripes]
        sums = PageSums(num_bytes) if self._verify else None
        return SsdFile(name, num_bytes, stripes, first, self._home, sums, extents)

    def close(self) -> None:
        """Remove files and folders, once transfers under way are done. Closing twice does no harm."""
        self._home.closed = True
        self._finalizer()

    def _require_room(self, name: str, sizes: Sequence[int]) -> None:
        """Raise `DoesNotFit` if a file system lacks the room; directories on one file system share it."""
        need: dict[int, int] = {}
        shared: dict[int, list[Path]] = {}
        for directory, size_bytes in zip(self.directories, sizes, strict=True):
            device = directory.stat().st_dev
            need[device] = need.get(device, 0) + size_bytes
            shared.setdefault(device, []).append(directory)
        for device, need_bytes in need.items():
            free_bytes = free_space(shared[device][0])
            if need_bytes > free_bytes:
                raise no_room(name, shared[device], need_bytes, free_bytes)

    def _allocate(self, name: str, stripe: Stripe, begin: int, end: int) -> None:
        size_bytes = end - begin
        if size_bytes == 0:
            return
        directory = Path(stripe.path).parent.parent
        free_bytes = free_space(directory)
        try:
            os.posix_fallocate(stripe.fd, begin, size_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise no_room(name, [directory], size_bytes, min(free_bytes, size_bytes - 1)) from error
            raise SsdError(
                f"{stripe.path}: {size_bytes} bytes could not be reserved ({error.strerror}). "
                "Name a directory on ext4, xfs or btrfs.",
                file=stripe.path,
                errno=error.errno,
            ) from error


def different(directories: Sequence[str | Path]) -> tuple[Path, ...]:
    """The directories, checked one by one and against each other."""
    if not directories:
        raise HardwareError("ssd directories: none given. Name at least one directory on an SSD.")
    seen: dict[tuple[int, int], Path] = {}
    for directory in (Path(directory) for directory in directories):
        found = check_directory(directory)
        first = seen.setdefault((found.st_dev, found.st_ino), directory)
        if first is not directory:
            raise HardwareError(
                f"ssd directory {directory}: is the same as {first}. Name each once, on a disk of its own each."
            )
    return tuple(path.resolve() for path in seen.values())


def make_engine(wanted: str, folders: Sequence[Path], verify: bool) -> tuple[Engine, str]:
    """The engine, and why it is not io_uring (empty if it is). Raises `HardwareError` if O_DIRECT does not work."""
    threads = ThreadEngine(len(folders))
    for folder in folders:
        try:
            probe(threads, folder)
        except SsdError as error:
            raise no_direct(folder.parent, str(error)) from error
    if wanted == "threads":
        return threads, "threads were asked for"
    if wanted == "auto" and verify:
        return threads, "threads compute the checksums of several pieces at once"
    try:
        ring = ring_engine(folders)
    except (ImportError, AttributeError, OSError, SsdError) as error:  # AttributeError: another wheel of that name
        reason = f"io_uring does not work here: {error}"
        if wanted == "io_uring":
            raise HardwareError(f'ssd engine: {reason}. Ask for "threads", which works everywhere.') from error
        return threads, reason
    threads.close()
    return ring, ""


def ring_engine(folders: Sequence[Path]) -> RingEngine:
    """The engine of io_uring, after a test in each folder. Raises what went wrong."""
    ring = RingEngine(len(folders))
    try:
        for folder in folders:
            probe(ring, folder)
    except BaseException:
        ring.close()
        raise
    return ring


def probe(engine: Engine, folder: Path) -> None:
    """Write a page past the page cache and read it back. Raises `SsdError`, or `HardwareError` if no file opens."""
    path = folder / "probe"
    descriptor = open_direct(path)
    try:
        memory = memoryview(mmap.mmap(-1, ALIGN_BYTES))
        memory[:] = written = secrets.token_bytes(ALIGN_BYTES)
        piece = Piece(descriptor, 0, memory, str(path), 0)
        engine.write([piece])
        memory[:] = bytes(ALIGN_BYTES)
        engine.read([piece])
        if memory != written:
            raise SsdError(f"{path}: a page does not read as it was written.", file=str(path))
    finally:
        os.close(descriptor)
        path.unlink()


def stripe_sizes(num_bytes: int, count: int, chunk_bytes: int, first: int) -> list[int]:
    """Bytes of each of `count` stripes when chunks go round robin, beginning at stripe `first`."""
    sizes = [0] * count
    chunks, rest = divmod(num_bytes, chunk_bytes)
    for stripe in range(count):
        after = (stripe - first) % count
        sizes[stripe] = (chunks - after + count - 1) // count * chunk_bytes if chunks > after else 0
    sizes[(first + chunks) % count] += rest
    return sizes


def free_space(directory: Path) -> int:
    """Bytes that this user may still take on the file system of `directory`."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def no_room(name: str, directories: Sequence[Path], need_bytes: int, free_bytes: int) -> DoesNotFit:
    missing_bytes = need_bytes - free_bytes
    places = ", ".join(str(directory) for directory in directories)
    return DoesNotFit(
        f"{name}: needs {format_bytes(need_bytes)} on the file system of {places}, where {format_bytes(free_bytes)} "
        f"are free: {missing_bytes} bytes are missing. Free them, or name a directory on a larger disk.",
        memory=f"ssd {places}",
        missing_bytes=missing_bytes,
    )


def _remove(pid: int, engine: Engine | None, folders: list[Scratch], descriptors: list[int]) -> None:
    """Undo everything, except in a process that was forked off: the files are its parent's."""
    if os.getpid() != pid:
        return
    if engine is not None:
        engine.close()
    while descriptors:
        os.close(descriptors.pop())
    while folders:
        folders.pop().remove()
