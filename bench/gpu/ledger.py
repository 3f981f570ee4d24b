"""The rows of `bench/gpu_first.py`, written at once, and what they say about which parts are done. Standard library
only: rows are the only state that one call leaves to the next."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

BEGINS, ENDS = "begins", "ends"
FILE = "gpu_first.jsonl"
KEYS = ("device", "small")  # rows that differ in one of these say nothing about each other
Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A resumable piece of work of one of the calls. It may take `limit_s`, and begin `tries` times."""

    call: int
    name: str
    limit_s: float
    tries: int = 3


@dataclass(frozen=True)
class State:
    """The state of one part by its rows: how often it began, whether it ended well, and else its last reason.

    A part that was cut together with its call began more often than it ended; it is open as if it had not begun."""

    begun: int
    done: bool
    failed: int
    reason: str

    @property
    def fresh(self) -> bool:
        """Whether it has neither ended well nor failed."""
        return not self.done and not self.failed


@dataclass(frozen=True)
class Ledger:
    """Rows of one device, full size or small, in `path`; `earlier` are files that are only read. `origin`: the fields
    of each row that say where it is from."""

    path: Path
    origin: Row
    earlier: tuple[Path, ...] = ()

    def write(self, part: Part, row: Row) -> Row:
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        whole = {"bench": "gpu_first", "call": part.call, "part": part.name, **row, "date": date, **self.origin}
        text = json.dumps(whole)
        print(text, flush=True)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        was_cut = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
        with open(self.path, "a") as file:  # one write, so that rows of two processes do not mix
            file.write("\n" * was_cut + text + "\n")
            file.flush()
            os.fsync(file.fileno())
        return whole

    def rows(self, part: str) -> list[Row]:
        """All rows of a part on this device, of this size."""
        files = [file for file in dict.fromkeys((*self.earlier, self.path)) if file.is_file()]
        found = [parsed for file in files for line in file.read_text().splitlines() if (parsed := _row(line))]
        return [row for row in found if row.get("part") == part and all(row.get(k) == self.origin[k] for k in KEYS)]

    def state(self, part: Part) -> State:
        rows = self.rows(part.name)
        ends = [row for row in rows if row["figure"] == ENDS]
        failures = [row for row in ends if row["ok"] is False]
        begun = sum(row["figure"] == BEGINS for row in rows)
        reason = failures[-1]["reason"] if failures else "it was cut with its call" if begun > len(ends) else ""
        return State(begun, len(failures) < len(ends), len(failures), reason)


def _row(line: str) -> Row | None:
    """None for a line that was cut in the writing."""
    try:
        row: Row = json.loads(line)
    except ValueError:
        return None
    return row
