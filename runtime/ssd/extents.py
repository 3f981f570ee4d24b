"""Pages of a scratch file that are read where the user already has them: frozen weights in files on the same disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ...ir.errors import SsdError
from .direct_io import ALIGN_BYTES


@dataclass(frozen=True)
class FileRange:
    """The bytes of a tensor in a file."""

    path: str
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Extent:
    """Whole pages of a scratch file, the bytes `begin` to `end`, whose contents a file of the user has from its byte
    `position` on, not always the first of a page. `stamp`: that of the user's file when the job began."""

    begin: int
    end: int
    fd: int
    position: int
    path: str
    stamp: tuple[int, int]

    def __len__(self) -> int:
        return self.end - self.begin

    def cut(self, begin: int, end: int) -> Extent:
        """The part of it between `begin` and `end`."""
        begin, end = max(begin, self.begin), min(end, self.end)
        return replace(self, begin=begin, end=end, position=self.position + begin - self.begin)

    def require_unchanged(self) -> None:
        """Raise `SsdError` where the user's file was written since."""
        if stamp_of(self.fd) != self.stamp:
            raise SsdError(
                f"{self.path}: was written after the job began, which reads frozen weights from this file. Restore the "
                "file and resume from the last checkpoint, or keep the weights in a directory that nothing else writes",
                file=self.path,
                offset_bytes=self.position,
            )


def stamp_of(fd: int) -> tuple[int, int]:
    """The length of an open file and the time of its last change."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


class OpenFiles:
    """The user's files on one disk, opened for reading. `descriptors`: a list, to which their descriptors are added."""

    def __init__(self, device: int, descriptors: list[int]):
        self._device, self._descriptors = device, descriptors
        self._known: dict[str, int] = {}  # -1: on another disk, or not to be opened

    def extents(self, ranges: Iterable[tuple[int, FileRange]]) -> Iterator[Extent]:
        """The whole pages of these ranges that are on the disk, each given with its offset in a scratch file."""
        for offset_bytes, found in ranges:
            begin = -(-offset_bytes // ALIGN_BYTES) * ALIGN_BYTES
            end = (offset_bytes + found.num_bytes) // ALIGN_BYTES * ALIGN_BYTES
            fd = self._open(found.path) if begin < end else -1
            if fd >= 0:
                yield Extent(begin, end, fd, found.begin + begin - offset_bytes, found.path, stamp_of(fd))

    def _open(self, path: str) -> int:
        if path not in self._known:
            self._known[path] = -1
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # whoever loads the weights says what is wrong
                return -1
            self._descriptors.append(fd)
            if os.fstat(fd).st_dev == self._device:
                self._known[path] = fd
        return self._known[path]
