"""Directories that are replaced as a whole: after a crash at any point one complete directory can be found.

A save writes into a hidden sibling, `.NAME.saving-*`. Once everything in the sibling has reached the disk, it is
renamed to `.NAME.ready`; from then on the save counts. Then `NAME` is renamed to `.NAME.old`, `.NAME.ready` to `NAME`,
and `.NAME.old` is deleted. `locate` and `settle` know what each of these names means.

Only one save at a time may be under way to a name: `begin` takes the lock `.NAME.lock`, which `replace` or `abort` in
the same process drops, or the kernel with that process. Several processes may write files into the hidden sibling.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...ir.errors import CheckpointError
from ...ir.units import format_bytes

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_locks: dict[Path, Lock] = {}  # of this process, by the hidden directory


class Lock:
    """A file that one process at a time has, until `drop` or its end. Raises `CheckpointError` that begins with `what`
    where another one has it. A file system without locks, as some of clusters are, refuses nobody."""

    def __init__(self, path: Path, what: str):
        self.path = path
        self._handle = self._open(what)
        while not self._is_at_path():  # its owner has just removed it
            os.close(self._handle)
            self._handle = self._open(what)
        os.truncate(self._handle, 0)
        os.write(self._handle, f"process {os.getpid()} on {socket.gethostname()}".encode())

    def _open(self, what: str) -> int:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return handle
            owner = os.read(handle, 200).decode("utf-8", "replace") or "another process"
            os.close(handle)
            if not isinstance(error, BlockingIOError):
                raise
            raise CheckpointError(
                f"{what}, and {owner} does so now: wait for its end, or name another directory"
            ) from None
        return handle

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._handle))
        except FileNotFoundError:
            return False

    def drop(self) -> None:
        self.path.unlink(missing_ok=True)
        fcntl.flock(self._handle, fcntl.LOCK_UN)  # for children that were forked, too
        os.close(self._handle)


def begin(directory: str | os.PathLike[str], need_bytes: int = 0) -> Path:
    """Make a hidden directory beside `directory`, which the caller fills and gives to `replace` (or `abort`).

    Finishes or removes what an interrupted save left. Raises `CheckpointError` if the place cannot be written, has less
    than `need_bytes` free, or another save to it is under way.
    """
    target = Path(directory).resolve()
    with disk_errors(target, need_bytes):
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(_sibling(target, "lock"), f"{target}: one save at a time may replace it")
        try:
            if target.exists() and not target.is_dir():
                raise CheckpointError(f"{target}: is a file; name a directory to save into.")
            settle(target)
            require_space(target.parent, need_bytes, what=str(target))
            temporary = target.parent / f".{target.name}.saving-{secrets.token_hex(4)}"
            temporary.mkdir()
        except BaseException:
            lock.drop()
            raise
    _locks[temporary] = lock
    return temporary


def replace(temporary: Path, directory: str | os.PathLike[str]) -> None:
    """Sync the filled `temporary` to the disk and rename it to `directory`, which it replaces if that exists."""
    target = Path(directory).resolve()
    with disk_errors(target):
        _sync_tree(temporary)
        ready = _sibling(target, "ready")
        temporary.rename(ready)
        _sync(target.parent)
        settle(target)
    _locks.pop(temporary).drop()


def abort(temporary: Path) -> None:
    """Remove the directory that `begin` made. The directory that it was to replace is untouched."""
    lock = _locks.pop(temporary, None)
    if lock is not None:
        try:
            shutil.rmtree(temporary, ignore_errors=True)
        finally:
            lock.drop()


@contextmanager
def saving(directory: str | os.PathLike[str], need_bytes: int = 0) -> Iterator[Path]:
    """Call `begin`, then `replace` when the body ends, or `abort` when it raises."""
    temporary = begin(directory, need_bytes)
    try:
        yield temporary
        replace(temporary, directory)
    except BaseException:
        abort(temporary)
        raise


def take_along(old: Path, temporary: Path, replaced: re.Pattern[str] | None = None) -> None:
    """Link (or else copy) what others have put into the old directory into the new one, but for names that are there
    already or match `replaced`."""
    for path in old.iterdir() if old.is_dir() else ():
        if (temporary / path.name).exists() or (replaced is not None and replaced.fullmatch(path.name)):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, temporary / path.name, symlinks=True, copy_function=_link)
        else:
            _link(str(path), str(temporary / path.name))


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def settle(target: Path) -> None:
    """Finish a save that is ready, rename `.NAME.old` back if `NAME` is missing, and remove unfinished saves."""
    ready, old = _sibling(target, "ready"), _sibling(target, "old")
    if ready.exists():
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        ready.rename(target)
    elif old.exists() and not target.exists():
        old.rename(target)
    if target.parent.exists():
        _sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
        prefix = f".{target.name}.saving-"
        for left in [p for p in target.parent.iterdir() if p.name.startswith(prefix)]:
            shutil.rmtree(left, ignore_errors=True)


def locate(directory: str | os.PathLike[str]) -> Path | None:
    """Return the path that holds the newest complete state of `directory`, changing nothing; None if there is none."""
    target = Path(directory).resolve()
    found = (_sibling(target, "ready"), target, _sibling(target, "old"))
    return next((path for path in found if path.is_dir()), None)


def names_in(parent: Path) -> list[str]:
    """Return the sorted names of the directories in `parent`, including names that only an interrupted save has."""
    names = set()
    for path in parent.iterdir():
        name, hidden = path.name, path.name.startswith(".")
        if hidden and name.endswith((".ready", ".old")):
            names.add(name[1:].rpartition(".")[0])
        elif path.is_dir() and not hidden:
            names.add(name)
    return sorted(names)


def require_space(place: Path, need_bytes: int, what: str) -> None:
    """Raise `CheckpointError` if the file system of `place` has less than `need_bytes` free."""
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < need_bytes:
        raise CheckpointError(_no_space(what, need_bytes, free_bytes))


@contextmanager
def disk_errors(path: Path, need_bytes: int = 0) -> Iterator[None]:
    """Turn an `OSError` of writing at `path` into a `CheckpointError` that says what is missing."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = next(p for p in (path, *path.parents) if p.exists())
            raise CheckpointError(_no_space(str(path), need_bytes, shutil.disk_usage(place).free)) from error
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror or error}{f': {error.filename}' if error.filename else ''}). "
            "What was saved there before is untouched; choose a directory that this user may write."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a small file and sync it to the disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _no_space(what: str, need_bytes: int, free_bytes: int) -> str:
    need = f"{format_bytes(need_bytes)} ({need_bytes} bytes) are needed" if need_bytes else "more is needed"
    return (
        f"{what}: the disk is full: {need}, {format_bytes(free_bytes)} ({free_bytes} bytes) are free. "
        "What was saved there before is untouched; free some space or save elsewhere."
    )


def _sibling(target: Path, state: str) -> Path:
    return target.parent / f".{target.name}.{state}"


def _sync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    """fsync of a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
