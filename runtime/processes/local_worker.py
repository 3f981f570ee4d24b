"""One local worker as its driver sees it: its process, its channel, and where it is."""

from __future__ import annotations

import signal
import socket
from collections.abc import MutableSequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from ..device.named_streams import describe_position
from ..forks import Fork

LOG_TAIL_BYTES = 4000


@dataclass
class Worker:
    """One started worker process. For `board` see `worker.open_board`."""

    device: int
    name: str
    process: Fork
    channel: socket.socket
    board: MutableSequence[int]
    file: Path
    log: Path
    reports: socket.socket  # from its threads: what `Saver` tells

    def position(self) -> tuple[str, str]:
        """See `describe_position`."""
        return describe_position(self.file, self.board)

    def lines_under_way(self) -> set[int]:
        """The lines of its file that its streams have begun and not ended."""
        return {line for line in self.board if line > 0}

    def log_tail(self) -> str:
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if self.log.exists() else ""

    def end_text(self) -> str:
        """The end of its process, as text."""
        code = self.process.poll()
        if code is None:
            return "closed its channel"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (the kernel does this when memory runs out)" if name == "SIGKILL" else ""
            return f"was ended by {name}{hint}"
        return f"ended with exit code {code}"

    # --- what the kernel says

    @cached_property
    def _process(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    def status(self) -> str:
        """One of psutil's STATUS_ words; empty for a process that is gone."""
        try:
            return self._process.status()
        except psutil.Error:
            return ""

    def activity(self) -> tuple[float, ...]:
        """Numbers that grow while its main thread runs; empty for a process that is gone."""
        try:
            with self._process.oneshot():
                own = next(each for each in self._process.threads() if each.id == self._process.pid)
                return (*self._process.num_ctx_switches(), own.user_time, own.system_time)
        except (psutil.Error, StopIteration):
            return ()
