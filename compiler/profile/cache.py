"""Measured seconds of blocks on disk: one small JSON file per block, device, precision and version of torch.

A file contains its key; a file with another key than the one asked for is never used. Files are written beside their
place and renamed, so that several processes may measure and write the same entry at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ...graph.profile import check_seconds
from ...graph.turn_seconds import TurnSeconds
from ...ir.errors import PlanError

FORMAT = 3  # of the entries, and of how they are measured: a new number makes all earlier entries stale


@dataclass(frozen=True)
class EntryKey:
    """The key of a time. Shapes and dtypes of the values are part of the block's hash."""

    block: str  # its structural hash
    device: str  # the part: "NVIDIA H200, 139 GiB", or the CPU's model, its cores, threads of a device, devices at once
    precision: str
    torch: str
    format: int = FORMAT


class ProfileCache:
    """A directory of entries, made when the first one is written."""

    def __init__(self, directory: str | Path | None = None):
        self.directory = default_directory() if directory is None else Path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise PlanError(f"profile={str(directory)!r} is a file; name a directory for measured times, or True")

    def path(self, key: EntryKey) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()
        return self.directory / f"{key.block}-{digest[:12]}.json"

    def load(self, key: EntryKey) -> TurnSeconds | None:
        """None where there is no entry, or a stale or damaged one (then with a warning: it will be measured anew).

        Raises `PlanError` naming the file and the figure that is NaN, zero, negative or missing.
        """
        path = self.path(key)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        entry, why = _entry_of(text, key)
        if why:
            warnings.warn(f"profile: {path} {why}; the block is measured anew", stacklevel=3)
            return None
        return _seconds_of(entry["seconds"], path)

    def save(self, key: EntryKey, seconds: TurnSeconds) -> None:
        """Write an entry atomically. Raises `PlanError` for seconds that cannot be, `OSError` where writing fails."""
        check_seconds(seconds, f"block {key.block} on {key.device}")
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.path(key)
        draft = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
        text = json.dumps({"key": asdict(key), "seconds": asdict(seconds)}, indent=1)
        try:
            draft.write_text(text + "\n", encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def default_directory() -> Path:
    """`penstock/profiles` under $XDG_CACHE_HOME, or under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "penstock" / "profiles"


def _entry_of(text: bytes, key: EntryKey) -> tuple[dict[str, Any], str]:
    """A file's entry, and why it cannot be used; empty where it can."""
    try:
        entry = json.loads(text)
    except ValueError as error:
        return {}, f"is damaged ({error})"
    if not isinstance(entry, dict) or not isinstance(entry.get("key"), dict) or "seconds" not in entry:
        return {}, "is damaged (it does not say how long what took)"
    wrong = [name for name, value in asdict(key).items() if entry["key"].get(name) != value]
    return entry, f"is of another {', '.join(wrong)}" if wrong else ""


def _seconds_of(found: Any, path: Path) -> TurnSeconds:
    names = [field.name for field in fields(TurnSeconds)]
    entries: Mapping[str, Any] = found if isinstance(found, dict) else {}
    missing = [name for name in names if name not in entries]
    if missing:
        raise PlanError(f"profile: {path} lacks {', '.join(missing)}; delete the file to have it measured anew")
    try:
        return check_seconds(TurnSeconds(**{name: entries[name] for name in names}), str(path))
    except PlanError as error:
        raise PlanError(f"{error}; delete the file to have it measured anew") from None
