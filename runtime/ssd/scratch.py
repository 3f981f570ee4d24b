"""Private folders that die with their process: removed at its end, or at the start of a later one after a crash.

A folder is held by an flock on the folder itself, which the kernel drops when the process dies, however it dies. A
process that gets the lock of another's folder may therefore remove that folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from ...ir.errors import HardwareError
from .direct_io import ALIGN_BYTES

_NAME = re.compile(r"penstock-[0-9a-f]{16}-.+")
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_ADVICE = "Name a directory on an SSD that this user may write, such as ~/penstock-scratch."


@dataclass(frozen=True)
class Scratch:
    """A folder with mode 0700 and the open descriptor that holds its lock."""

    path: Path
    lock: int

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def check_directory(directory: Path) -> os.stat_result:
    """The status of `directory`. Raises `HardwareError` if it is missing, no directory, or in memory."""
    try:
        found = directory.stat()
    except FileNotFoundError:
        raise HardwareError(f"ssd directory {directory}: does not exist. Make it first. {_ADVICE}") from None
    except OSError as error:
        raise HardwareError(f"ssd directory {directory}: {error.strerror}. {_ADVICE}") from error
    if not directory.is_dir():
        raise HardwareError(f"ssd directory {directory}: is a file, not a directory. {_ADVICE}")
    kind = file_systems().get(found.st_dev)
    if kind in _IN_MEMORY:
        raise HardwareError(f"ssd directory {directory}: lies in memory ({kind}), not on a disk. {_ADVICE}")
    return found


def make(directory: Path, owner: str) -> Scratch:
    """A new, locked folder in `directory`. Raises `HardwareError` if it cannot be made."""
    while True:
        path = directory / f"penstock-{secrets.token_hex(8)}-{owner}"
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise HardwareError(
                f"ssd directory {directory}: cannot be written ({error.strerror}). {_ADVICE}"
            ) from error
        lock = _lock(path)
        if lock is not None:
            return Scratch(path, lock)


def remove_left(directory: Path) -> list[Path]:
    """Remove the folders that crashed processes of this user left in `directory`; those of live ones stay."""
    removed = []
    for entry in os.scandir(directory):
        if not _NAME.fullmatch(entry.name):
            continue
        try:
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # a link, a file, another user's, or just removed: not ours to touch
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid() and _is_free(lock):
                shutil.rmtree(entry.path, ignore_errors=True)
                removed.append(Path(entry.path))
        finally:
            os.close(lock)
    return removed


def open_direct(path: Path) -> int:
    """A new file, mode 0600, read and written past the page cache. Raises `HardwareError` if that is impossible."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            raise no_direct(path.parent.parent, os.strerror(error.errno)) from error
        raise HardwareError(f"{path}: cannot be made ({error.strerror}). {_ADVICE}") from error


def no_direct(directory: Path, reason: str) -> HardwareError:
    kind = file_systems().get(directory.stat().st_dev, "its file system")
    return HardwareError(
        f"ssd directory {directory}: {kind} refuses O_DIRECT access in blocks of {ALIGN_BYTES} bytes ({reason}). "
        "Name a directory on ext4, xfs or btrfs, whose files can be read and written past the page cache."
    )


def file_systems() -> dict[int, str]:
    """The type of each mounted file system ("ext4") by its device number."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        major, minor = fields[2].split(":")
        found[os.makedev(int(major), int(minor))] = fields[fields.index("-") + 1]
    return found


def _lock(path: Path) -> int | None:
    """The descriptor that locks a new folder; None if another job's start took the folder for a crashed one's."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.samestat(path.stat(), os.fstat(lock)):
            return lock
    except FileNotFoundError:
        pass
    except OSError as error:
        os.close(lock)
        raise HardwareError(f"ssd directory {path.parent}: no locks there ({error.strerror}). {_ADVICE}") from error
    os.close(lock)
    return None


def _is_free(lock: int) -> bool:
    """Take the lock if nobody has it; whether that worked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
