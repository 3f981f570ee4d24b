"""Rows that ranks leave for each other in the rendezvous store: plain JSON with the random identity of their run.

Whoever reaches the store may write into it. A row that is not as this run writes it is nobody's: it is read as None.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

MOST_BYTES = 1 << 28  # of the largest row, in which all ranks' spans come together
T = TypeVar("T")


def _require_error(data: dict[str, Any]) -> dict[str, Any]:
    """Raise `ValueError` unless the data is of an error, as `error_to_data` returns it."""
    kinds = {key: type(value) for key, value in data.items()}
    if kinds != {"type": str, "message": str, "fields": dict, "traceback": str}:
        raise ValueError("not the data of an error")
    return data


@dataclass(frozen=True)
class Member:
    """One rank. `node` is the same for all ranks of one torchrun agent; `clock_s` is wall-clock time less
    `perf_counter`; `address` is its host's, on the way to the store's host."""

    rank: int
    id: str
    node: str
    host: str
    pid: int
    clock_s: float
    address: str

    def __str__(self) -> str:
        return f"rank {self.rank} (on {self.host}, process {self.pid})"


@dataclass
class Failure:
    """A rank's report. `error` is as `error_to_data` returns it; `blamed` is the rank that the error is about.

    `waited` says that the rank only lost another one, and that the rank to blame is unknown. `left_round` is the number
    of exchanges that the rank had finished when it ended or closed; it matters only to ranks that go on.
    """

    rank: int
    error: Annotated[dict[str, Any], AfterValidator(_require_error)]
    blamed: int | None = None
    waited: bool = False
    left_round: int | None = None


@dataclass(frozen=True)
class Roster:
    """All ranks of a run, in order; `run` is its random identity."""

    run: str
    members: list[Member]


@dataclass(frozen=True)
class Beat:
    """A sign of life: its number, and what the rank says of its place."""

    number: int
    place: str | list[int] | None


@dataclass(frozen=True)
class Given:
    """The data of one rank, or of all ranks together, in an exchange."""

    value: Any


def to_row(value: Any, run: str = "") -> str:
    """The row of a value that is JSON or one of this file's classes. `run`: empty while the ranks arrive."""
    return json.dumps({"run": run, "value": value}, default=vars)


def from_row(row: bytes | str | None, kind: type[T], run: str = "") -> T | None:
    """The value of a row, None if it is no row of this run, or no `kind`."""
    if row is None or len(row) > MOST_BYTES:
        return None
    try:
        found = json.loads(row)
        if not isinstance(found, Mapping) or found.get("run") != run or "value" not in found:
            return None
        wanted: Any = kind
        value: T = _adapter(wanted).validate_python(found["value"])
        return value
    except (ValidationError, ValueError, RecursionError):
        return None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
