"""A directory on an SSD: whether it takes files of a run, and files that are opened past the page cache."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ...ir.errors import HardwareError
from .. import scratch
from ..scratch import Scratch
from .direct_io import ALIGN_BYTES

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_ADVICE = "Name a directory on an SSD that this user may write, such as ~/penstock-scratch."


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
        raise HardwareError(f"ssd directory {directory}: is in memory ({kind}), not on a disk. {_ADVICE}")
    return found


def make_folder(directory: Path, owner: str) -> Scratch:
    """A new private folder in `directory`, where what ended processes left is removed first. Raises `HardwareError` if
    it cannot be made."""
    scratch.remove_left([directory])
    try:
        return scratch.make(directory, owner)
    except OSError as error:
        raise HardwareError(f"ssd directory {directory}: cannot be written ({error.strerror}). {_ADVICE}") from error


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
