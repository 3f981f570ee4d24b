"""Signs of life of the local workers that a call waits for, and which worker is to blame if they stop.

A worker in a run gives a sign of life whenever a line of its file begins or ends. Where no line is under way, and in
other commands, it gives one whenever its main thread uses the CPU. Bytes of its messages are signs, too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence, Set
from typing import Any

import psutil

from ...ir.calls import op_of
from .local_worker import Worker
from .setup import RunSetup
from .wire import LOOK_S, Idle

RUNS = ("run_step", "begin_step", "finish_step", "run_evaluate")
SET_UP = "set_up"
STOPPED = {psutil.STATUS_STOPPED: "is stopped (SIGSTOP)", psutil.STATUS_TRACING_STOP: "is stopped by a debugger"}


class Lost(Exception):
    """No answer will come: `device` is to blame, as `what` says."""

    def __init__(self, device: int, what: str):
        super().__init__(what)
        self.device, self.what = device, what


class WorkerWatch:
    """Looks after `workers` while calls wait for them.

    `meeting` has, per worker, the lines at which it waits for others. `patience_s` is how long a worker may give no
    sign of life; only seconds in which this process looks count, so that a script that was itself stopped loses none.
    """

    def __init__(self, workers: Sequence[Worker], meeting: Sequence[Set[int]], patience_s: float):
        self.workers, self.meeting, self.patience_s = workers, meeting, patience_s
        self._command = ""
        self._looked_s = 0.0
        self._signs: dict[int, Any] = {}
        self._silent_s: dict[int, float] = {}

    def begin(self, command: str) -> None:
        """A new call begins."""
        self._command, self._looked_s = command, time.monotonic()
        self._signs, self._silent_s = {}, {}

    def look(self, devices: Collection[int], left_bytes: int = 0) -> None:
        """Called about every `LOOK_S` while nothing arrives from these devices; `left_bytes` are those of a message
        that are still to come or go. Raises `Lost` when waiting longer is in vain."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * LOOK_S), now_s
        for device in devices:
            sign = (left_bytes, *self._sign_of(device))
            if self._signs.get(device) == sign:
                self._silent_s[device] += passed_s
            else:
                self._signs[device], self._silent_s[device] = sign, 0.0
        silent = [device for device in devices if self._silent_s[device] >= self.patience_s]
        if silent:
            self._judge(
                sorted(silent, key=lambda device: -self._silent_s[device]), everyone=len(silent) == len(devices)
            )

    def idle(self, device: int) -> Idle:
        """`look` for the time of one message from or to a device."""
        return lambda left_bytes: self.look([device], left_bytes)

    def _sign_of(self, device: int) -> tuple[Any, ...]:
        """A value that changes while the worker is alive and at work."""
        worker = self.workers[device]
        lines = tuple(worker.board)
        if self._command in RUNS and worker.lines_under_way():
            return lines
        return (*lines, *worker.activity())

    def _judge(self, silent: Sequence[int], everyone: bool) -> None:
        """Raise `Lost` if one of the silent devices, the longest silent first, is to blame."""
        for device in silent:
            kind = self.workers[device].status()
            if kind in STOPPED:
                raise Lost(device, f"{STOPPED[kind]} and has shown no sign of life for {self.patience_s:g} s")
        for device in silent:
            if not self._waits_for_others(device):
                raise Lost(
                    device,
                    f"has shown no sign of life for {self.patience_s:g} s; work that takes longer without one needs a "
                    "larger timeout_s",
                )
        if everyone:
            others = ", ".join(f"{device} {self.workers[device].position()[0]}" for device in silent[1:])
            waits = f"; the others wait too: {others}" if others else ""
            raise Lost(silent[0], f"has waited for other devices for {self.patience_s:g} s{waits}")

    def _waits_for_others(self, device: int) -> bool:
        if self._command in RUNS:
            lines = self.workers[device].lines_under_way()
            return bool(lines) and lines <= self.meeting[device]
        return self._command == SET_UP


def meeting_lines(setup: RunSetup) -> list[set[int]]:
    """Per device, the lines of its file at which it waits for other devices."""
    found = []
    for device in range(setup.interface.world_size):
        programs = setup.programs_of(device).values()
        nodes = [node for program in programs for node in program.ops() if op_of(node).meets]
        found.append({node.meta["line"] for node in nodes})
    return found
