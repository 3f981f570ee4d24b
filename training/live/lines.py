"""The progress of a run as a line now and then, for files and terminals that cannot draw."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from ...ir.units import format_bytes, format_seconds
from ..listener import Listener, RunFacts, StepRecord
from .state import RunState, Snapshot

LINES = 20  # the number of lines that a run prints


class ProgressLines(Listener):
    """Prints loss, tokens a second, measured and predicted step and the peak of each memory, in a thread of its own: of
    its first step, of its last, and of every n-th."""

    def __init__(self, screen: Console, state: RunState | None = None):
        self.screen, self.state = screen, state or RunState()
        self._every = self._total = self._steps = 0
        self._printer: ThreadPoolExecutor | None = None

    def begin(self, run: RunFacts) -> None:
        self.state.begin(run)
        self._total, self._every = run.total_steps, max(1, run.total_steps // LINES)
        self._printer = ThreadPoolExecutor(1, "penstock-lines")

    def step(self, record: StepRecord) -> None:
        self.state.step(record)
        self._steps += 1
        is_due = record.step % self._every == 0 or record.step == self._total or self._steps == 1
        if is_due and self._printer is not None:
            self._printer.submit(self._print, self.state.snapshot())

    def flush(self) -> None:
        if self._printer is not None:
            self._printer.submit(int).result()  # what was submitted before is done by then

    def end(self, interrupted: bool = False) -> None:
        printer, self._printer = self._printer, None
        if printer is not None:
            printer.shutdown()

    def _print(self, now: Snapshot) -> None:
        self.screen.print(f"step {now.step} of {now.total_steps}: {figures_text(now)}", soft_wrap=True)


def figures_text(now: Snapshot) -> str:
    """The figures of the last steps in one line, where there has been a step."""
    assert now.loss is not None and now.tokens_per_s is not None and now.step_s is not None
    predicted = "" if now.predicted_s is None else f" (predicted {format_seconds(now.predicted_s)})"
    return (
        f"loss {now.loss:.4f}, {now.tokens_per_s:,.0f} tokens/s, step {format_seconds(now.step_s)}{predicted}, "
        f"{memory_text(now.peak_bytes)}"
    )


def memory_text(peak_bytes: Mapping[str, int]) -> str:
    """ "gpu0 1.2 GiB, dram0 3.4 GiB": the peak of each memory that holds something."""
    return ", ".join(f"{memory} {format_bytes(peak)}" for memory, peak in sorted(peak_bytes.items()) if peak)
