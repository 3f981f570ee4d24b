"""Tokenised rows on disk: made once per host, found by a hash of all that decides on them.

Several processes of one host agree by a lock: one makes the rows, the others read them, from the same pages of memory.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ..compiler.packing import documents
from ..ir.errors import PlanError
from ..ir.units import format_bytes

MAKERS = (Path(__file__).parent, Path(documents.__file__).parent)  # the code that makes rows
SETTING = "PENSTOCK_CACHE"  # the directory of caches


def cache_directory() -> Path:
    """~/.cache/penstock/tokens, or as PENSTOCK_CACHE says."""
    chosen = os.environ.get(SETTING)
    return (Path(chosen) if chosen else Path.home() / ".cache" / "penstock") / "tokens"


def key_of(*parts: str) -> str:
    """A hash of the parts, and of the code that makes rows of them."""
    found = hashlib.sha256()
    for folder in MAKERS:
        for file in sorted(folder.glob("*.py")):
            found.update(file.read_bytes())
    for part in parts:
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:32]


def load_or_make(key: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `make`, tensors and plain values, made once for each key. Raises what `make` raises, and
    `PlanError` where the directory cannot be written."""
    directory = cache_directory()
    path = directory / f"{key}.pt"
    lock = FileLock(directory / f"{key}.lock")
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    try:
        found = _read(path)
        if found is None:
            found = make()
            with _writing(directory):
                _write(path, found)
        return found
    finally:
        lock.release()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlanError(
            f"the cache of tokens {directory} cannot be written: {error}; {SETTING}=DIRECTORY names another place"
        ) from error


def _write(path: Path, found: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    try:
        torch.save(found, part)
        os.replace(part, path)
    except RuntimeError as error:  # as torch tells of a full disk
        free = format_bytes(shutil.disk_usage(path.parent).free)
        raise OSError(f"its disk is full, or broken: {free} are free") from error
    finally:
        part.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    """The file's content, mapped into memory; None where there is none, or a damaged one."""
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
        return None
    return found
