"""Directories that are replaced as a whole: after a crash at any point one complete directory can be found.

A save writes into a hidden sibling, `.NAME.saving-*`. When everything in it has reached the disk it is renamed to
`.NAME.ready`, which is the moment the save counts. Then the present `NAME` steps aside to `.NAME.old`, the ready one
takes its place, and the old one is deleted. `locate` and `settle` know what each of these names means.

One process at a time may save to the same name; several may write files into its hidden sibling.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...ir.errors import CheckpointError
from ...ir.units import format_bytes


def begin(directory: str | os.PathLike[str], need_bytes: int = 0) -> Path:
    """A fresh hidden directory beside `directory`, to be filled and handed to `replace` (or `abort`).

    Finishes or clears away what an interrupted save has left. Raises `CheckpointError` where the place cannot be
    written or has less than `need_bytes` free.
    """
    target = Path(directory).resolve()
    with disk_errors(target, need_bytes):
        if target.exists() and not target.is_dir():
            raise CheckpointError(f"{target}: is a file; name a directory to save into.")
        target.parent.mkdir(parents=True, exist_ok=True)
        settle(target)
        require_space(target.parent, need_bytes, what=str(target))
        temporary = target.parent / f".{target.name}.saving-{secrets.token_hex(4)}"
        temporary.mkdir()
    return temporary


def replace(temporary: Path, directory: str | os.PathLike[str]) -> None:
    """Bring the filled `temporary` to the disk and put it in the place of `directory`, which may exist."""
    target = Path(directory).resolve()
    with disk_errors(target):
        _sync_tree(temporary)
        ready = _sibling(target, "ready")
        temporary.rename(ready)
        _sync(target.parent)
        settle(target)


def abort(temporary: Path) -> None:
    """Remove what `begin` made. The directory that was to be replaced is as it was."""
    shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def saving(directory: str | os.PathLike[str], need_bytes: int = 0) -> Iterator[Path]:
    """`begin`, then `replace` when the body ends, or `abort` when it raises."""
    temporary = begin(directory, need_bytes)
    try:
        yield temporary
        replace(temporary, directory)
    except BaseException:
        abort(temporary)
        raise


def settle(target: Path) -> None:
    """Finish a save that became ready, put back a directory that had stepped aside, remove everything half written."""
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
    """Where the newest complete state of `directory` lies now, without touching anything; None where there is none."""
    target = Path(directory).resolve()
    found = (_sibling(target, "ready"), target, _sibling(target, "old"))
    return next((path for path in found if path.is_dir()), None)


def names_in(parent: Path) -> list[str]:
    """Names of the directories in `parent`, those of interrupted saves included, sorted."""
    names = set()
    for path in parent.iterdir():
        name, hidden = path.name, path.name.startswith(".")
        if hidden and name.endswith((".ready", ".old")):
            names.add(name[1:].rpartition(".")[0])
        elif path.is_dir() and not hidden:
            names.add(name)
    return sorted(names)


def require_space(place: Path, need_bytes: int, what: str) -> None:
    """Raises `CheckpointError` where the file system of `place` has less than `need_bytes` free."""
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < need_bytes:
        raise CheckpointError(_no_space(what, need_bytes, free_bytes))


@contextmanager
def disk_errors(path: Path, need_bytes: int = 0) -> Iterator[None]:
    """Turn the system's errors of writing at `path` into a `CheckpointError` that says what is missing."""
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
    """Write a small file and bring it to the disk."""
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
