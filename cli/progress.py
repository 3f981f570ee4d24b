"""The progress of a training run: a bar on a terminal, or a line now and then in a file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..compiler.job.job import StepReport
from ..ir.units import format_bytes, format_seconds

LINES = 20  # the number of lines that a run prints into a file
RECENT = 20  # the number of steps over which figures are averaged


class StepScreen:
    """Shows loss, tokens/s, measured and predicted step time and the peak of each memory, step by step."""

    def __init__(self, screen: Console, total_steps: int, done_steps: int, tokens_per_step: int):
        self.screen, self.total, self.tokens = screen, total_steps, tokens_per_step
        self.recent: list[StepReport] = []
        self.every = max(1, total_steps // LINES)
        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=screen) if screen.is_terminal else None
        self.task = None if self.bar is None else self.bar.add_task("", total=total_steps, completed=done_steps)

    def show(self, report: StepReport) -> None:
        self.recent = [*self.recent, report][-RECENT:]
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=report.step, description=self.text(report))
        elif report.step % self.every == 0 or report.step in (1, self.total):
            self.screen.print(f"step {report.step} of {self.total}: {self.text(report)}", soft_wrap=True)

    def text(self, report: StepReport) -> str:
        step_s = statistics.median(r.seconds for r in self.recent)
        loss = statistics.fmean(r.loss for r in self.recent)
        predicted = "" if report.predicted_s is None else f" (predicted {format_seconds(report.predicted_s)})"
        return (
            f"loss {loss:.4f}, {self.tokens / step_s:,.0f} tokens/s, step {format_seconds(step_s)}{predicted}, "
            f"{memory_text(report.peak_bytes)}"
        )

    def __enter__(self) -> StepScreen:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.stop()


def memory_text(peak_bytes: Mapping[str, int]) -> str:
    """ "gpu0 1.2 GiB, dram0 3.4 GiB": the peak of each memory that holds something."""
    return ", ".join(f"{memory} {format_bytes(peak)}" for memory, peak in sorted(peak_bytes.items()) if peak)
