"""The step that a rank's device is still at work on while the script goes on: who ends it, and who hears of its end.

A thread beside the script waits for the device's last op, and leaves the step's report in the store, where any rank can
read it alone. Nobody reads the report of a step before the last: all ranks have called for a step when one begins.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from ..device.session import DeviceSession, Run, StepResult
from .ranks import Ranks


class Tail:
    """Runs the steps of a session. `fail` is called, in the thread, with the error that broke off the end of a step."""

    def __init__(self, session: DeviceSession, ranks: Ranks, fail: Callable[[Exception], None]):
        self.number = 0  # of the last step that began here, from 1
        self._session, self._ranks, self._fail = session, ranks, fail
        self._posted = 0  # the number of the last step whose report is in the store
        self._read: tuple[int, list[dict[str, Any]]] = 0, []  # the reports that were read last, and their step's number
        self._error: Exception | None = None  # what the thread found, for the script to raise
        self._lock = threading.Lock()  # held by whoever runs the session
        self._begun: SimpleQueue[tuple[int, Run | None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="penstock-tail", daemon=True)
        self._thread.start()

    def begin(self, batch: Mapping[str, Tensor], stop_on_nan: bool) -> StepResult:
        """See `DeviceSession.begin_step`; the report is that of the step before."""
        with self._lock:
            self._require_whole()
            values = self._session.begin_step(batch, stop_on_nan)
            self.number += 1
            self._begun.put((self.number, self._session.tail))
            return StepResult(values, self._session.report_before, self._session.refusal())

    def finish(self) -> None:
        """Wait for the end of the step that began last, and leave its report. Raises what broke it off."""
        with self._lock:
            self._require_whole()
            self._end()

    def reports(self) -> list[dict[str, Any]]:
        """Each rank's report of the last step, as soon as all are there."""
        if self._read[0] != self.number:
            self._read = self.number, self._ranks.read(_name(self.number))
        return self._read[1]

    def close(self) -> None:
        self._begun.put(None)

    def _require_whole(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self) -> None:
        report = self._session.finish_step()
        if self._posted < self.number:
            self._ranks.put(_name(self.number), report, _name(self._posted) if self._posted else "")
            self._posted = self.number

    def _follow(self) -> None:
        while (begun := self._begun.get()) is not None:
            number, run = begun
            if run is not None:
                with contextlib.suppress(RuntimeError):  # of the GPU: `_end` raises it, with its place
                    run.wait()
            with self._lock:
                if number == self.number and self._error is None:
                    self._end_here()
            del begun, run  # the values of the step

    def _end_here(self) -> None:
        try:
            self._end()
        except Exception as error:
            self._error = error
            self._fail(error)


def _name(number: int) -> str:
    return f"report/{number}"
