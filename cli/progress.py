"""The progress of a training run: a bar on a terminal, or a line now and then in a file."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..compiler.job.job import Job, StepReport
from ..ir.units import format_bytes, format_seconds

LINES = 20  # the number of lines that a run prints into a file
RECENT = 20  # the number of steps over which figures are averaged


class StepScreen:
    """Shows loss, tokens/s, measured and predicted step time and the peak of each memory.

    It reads the job's report only of the first step and of those that have a line: reading waits for a step's end, and
    so holds up the next one. A step takes from one `show` to the next, with its data and checkpoints.
    """

    def __init__(self, screen: Console, total_steps: int, done_steps: int, tokens_per_step: int):
        self.screen, self.total, self.tokens = screen, total_steps, tokens_per_step
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.losses: deque[float] = deque(maxlen=RECENT)
        self.report: StepReport | None = None  # of the last step that had a line
        self.every = max(1, total_steps // LINES)
        self.shown_s = time.perf_counter()
        columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self.bar = Progress(*columns, console=screen) if screen.is_terminal else None
        self.task = None if self.bar is None else self.bar.add_task("", total=total_steps, completed=done_steps)

    def show(self, job: Job, loss: float) -> None:
        """Show the step that the job has just made."""
        now_s, step = time.perf_counter(), job.step_count
        self.seconds.append(now_s - self.shown_s)
        self.losses.append(loss)
        has_line = step % self.every == 0 or step in (1, self.total)
        if has_line or self.report is None:
            self.report = job.last
        assert self.report is not None
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=step, description=self.text(self.report))
        elif has_line:
            self.screen.print(f"step {step} of {self.total}: {self.text(self.report)}", soft_wrap=True)
        self.shown_s = now_s

    def text(self, report: StepReport) -> str:
        step_s = statistics.median(self.seconds)
        predicted = "" if report.predicted_s is None else f" (predicted {format_seconds(report.predicted_s)})"
        return (
            f"loss {statistics.fmean(self.losses):.4f}, {self.tokens / step_s:,.0f} tokens/s, "
            f"step {format_seconds(step_s)}{predicted}, {memory_text(report.peak_bytes)}"
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
