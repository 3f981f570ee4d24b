"""A log of one JSON object a line, whose "event" is begin, step, evaluation, offer or end, in their order."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from ...ir.errors import PlanError
from ..listener import OfferRecord, RunFacts, StepRecord
from ..plain import finite
from .queued import QueuedListener

FILE = "log.jsonl"


class JsonLog(QueuedListener):
    """Adds to DIRECTORY/log.jsonl; a resumed run goes on after its earlier lines. A figure that is not finite is
    null."""

    name = "jsonl"
    _file: IO[str]

    def open(self, run: RunFacts) -> None:
        path = self.directory / FILE
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  (by line)
            if _is_torn(path):
                self._file.write("\n")
            self._write("begin", _fields_of(run))
        except OSError as error:
            raise PlanError(f"the log {path} cannot be written: {error.strerror}") from error

    def write_step(self, record: StepRecord) -> None:
        self._write("step", {**_fields_of(record), "tokens_per_s": record.tokens_per_s})

    def write_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("evaluation", {"step": step, "metrics": metrics})

    def write_offer(self, offer: OfferRecord) -> None:
        self._write("offer", _fields_of(offer))

    def write_end(self, interrupted: bool) -> None:
        self._write("end", {"interrupted": interrupted})
        self._file.close()

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        row = {"event": event, "time_s": self.time_s, **values}
        self._file.write(json.dumps(finite(row), allow_nan=False, default=str) + "\n")


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end, as a full disk may leave it."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _fields_of(row: RunFacts | StepRecord | OfferRecord) -> dict[str, Any]:
    return {field.name: getattr(row, field.name) for field in fields(row)}
