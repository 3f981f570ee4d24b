"""Private folders that die with their process: removed by it, by its keeper when it is killed, or at the latest when
another process makes a folder beside them.

A folder is one of ours if its file `MARKER` says so. The marker holds the folder's name and number (inode), so that a
copy, or a folder that the user has renamed, stays. Whoever made the folder holds an flock on the marker, which the
kernel drops when that process ends, however it ends. A process that gets the lock may therefore remove the folder.

This file is also the keeper's program. It imports the standard library only, so that a keeper starts at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

MARKER = ".penstock-scratch"
_NEW_MARKER = f"{MARKER}.new"
_PREFIX = "penstock-"  # only folders of such names are looked into; the marker decides
_MARKER_BYTES = 4096
SOCKET_BYTES = 107  # of the path in the address of a Unix socket
_AGAIN_S = (0.0, 0.1, 1.0)  # before each look of a keeper: a process that ends closes its files one after another


class Scratch:
    """A folder with mode 0700, removed by `remove`, by the end of a `with`, and at the latest when this process ends
    normally. A process that was forked off does not remove it."""

    def __init__(self, path: Path, lock: int):
        self.path = path
        self._finalizer = weakref.finalize(self, _remove, os.getpid(), path, lock)

    def remove(self) -> None:
        """May be called twice."""
        self._finalizer()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()


def make(directory: Path, owner: str) -> Scratch:
    """A new folder `penstock-ID-OWNER` in `directory`. Raises `OSError` if it cannot be made or locked."""
    path = directory / f"{_PREFIX}{secrets.token_hex(8)}-{owner}"
    path.mkdir(mode=0o700)
    lock = -1
    try:
        lock = os.open(path / _NEW_MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, json.dumps(_identity(path, path.stat())).encode())
        os.rename(path / _NEW_MARKER, path / MARKER)  # it is locked when others first see it
    except BaseException:
        if lock >= 0:
            os.close(lock)
        shutil.rmtree(path, ignore_errors=True)
        raise
    return Scratch(path, lock)


def temporary(owner: str) -> Scratch:
    """A new folder in the directory of temporary files, where what ended processes left is removed first."""
    directory = Path(tempfile.gettempdir())
    remove_left([directory])
    return make(directory, owner)


@contextmanager
def reachable(path: str) -> Iterator[str]:
    """The path of a socket to bind or connect to: where it is too long for an address, as a folder of temporary files
    that a scheduler gives a job may make it, by the descriptor of its folder, which is open meanwhile."""
    if len(os.fsencode(path)) <= SOCKET_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def remove_left(directories: Iterable[str | Path]) -> list[Path]:
    """Remove the folders that ended processes of this user left in `directories`; those of live processes stay."""
    removed = []
    for directory in directories:
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(directory) as found:
            entries = [entry for entry in found if entry.name.startswith(_PREFIX)]
        for entry in entries:
            lock = _claim(Path(entry.path))
            if lock is not None:
                _clear(Path(entry.path))
                os.close(lock)
                removed.append(Path(entry.path))
    return removed


class Keeper:
    """A process that waits until this one is gone, and then removes what was left in `directories`.

    It also waits for all processes that inherit `handle`, a file descriptor. Signals that end a whole session or
    service do not end it.
    """

    def __init__(self, directories: Iterable[str | Path]):
        reading, self.handle = os.pipe()
        paths = [os.path.abspath(directory) for directory in directories]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", os.path.abspath(__file__), str(reading), *paths],
                pass_fds=[reading],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        except BaseException:
            os.close(self.handle)
            raise
        finally:
            os.close(reading)
        self.process_id = process.pid
        self._finalizer = weakref.finalize(self, _dismiss, os.getpid(), process, self.handle)

    def close(self) -> None:
        """End the keeper: everything has been removed. May be called twice."""
        self._finalizer()


def _identity(path: Path, status: os.stat_result) -> dict[str, str | int]:
    return {"folder": path.name, "inode": status.st_ino}


def _claim(path: Path) -> int | None:
    """The locked marker of a folder that an ended process left; None for any other folder."""
    with contextlib.ExitStack() as stack:
        try:
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, folder)
            lock = os.open(MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError:  # a link, a file, another user's, without a marker, or just removed: not ours to touch
            return None
        if _is_left(path, os.fstat(folder), lock):
            return lock
        os.close(lock)
        return None


def _is_left(path: Path, folder: os.stat_result, lock: int) -> bool:
    """Whether the open marker `lock` is that of the folder, this user's, and its maker gone; then it is locked now."""
    marker = os.fstat(lock)
    if not stat.S_ISREG(marker.st_mode) or not folder.st_uid == marker.st_uid == os.geteuid():
        return False
    try:
        if json.loads(os.read(lock, _MARKER_BYTES)) != _identity(path, folder):
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError, RecursionError):  # in use, or no text of ours
        return False
    return os.fstat(lock).st_nlink > 0  # else another process has removed the folder meanwhile


def _clear(path: Path) -> None:
    """Remove a folder, its marker last, so that what cannot be removed now is still known as ours later."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(path)):
            if entry.name == MARKER:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        os.unlink(path / MARKER)
        os.rmdir(path)


def _remove(owner: int, path: Path, lock: int) -> None:
    if os.getpid() == owner:
        _clear(path)
        os.close(lock)


def _dismiss(owner: int, process: subprocess.Popen[bytes], handle: int) -> None:
    if os.getpid() == owner:
        process.kill()
        process.wait()
        os.close(handle)


def _keep(handle: int, directories: list[str]) -> None:
    """The keeper's work."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(handle, 1)  # returns at the end of the last process that has the other side
    for wait_s in _AGAIN_S:
        time.sleep(wait_s)
        remove_left(directories)


if __name__ == "__main__":
    _keep(int(sys.argv[1]), sys.argv[2:])
