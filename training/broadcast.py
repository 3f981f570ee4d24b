"""Tells listeners of a job's run: the loop that trains calls one method after each thing that it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..compiler.job.job import Job
from .listener import Listener, RunFacts
from .records import StepRecords


class Broadcast:
    """`begin` once the job is compiled or resumed, `stepped` after each `job.step`, `evaluated`, and `end` at the end,
    before the job closes. None of them waits for a step, but `end`."""

    def __init__(self, job: Job, listeners: Sequence[Listener], records: StepRecords | None = None):
        self.job, self.listeners = job, list(listeners)
        self.records = StepRecords(job) if records is None else records
        self._begun: list[Listener] = []

    def begin(self, run: RunFacts) -> None:
        """Raises what a listener raises that cannot begin, such as one without its library."""
        for listener in self.listeners:
            listener.begin(run)
            self._begun.append(listener)

    def stepped(self, tokens: int) -> None:
        """The job has made a step of that many tokens. Tells of the steps that are known to have ended."""
        self.records.stepped(tokens)
        self._tell()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """The job, at its present step, has these figures on held-out rows."""
        self._tell()
        for listener in self._begun:
            listener.evaluated(self.job.step_count, metrics)

    def end(self, interrupted: bool = False) -> None:
        """Tells of the last step, unless it broke off, and of the end. May be called again, and then does nothing."""
        begun, self._begun = self._begun, []
        if not begun:
            return
        self._tell(begun)
        for listener in begun:
            listener.end(interrupted)

    def _tell(self, listeners: Sequence[Listener] | None = None) -> None:
        for record in self.records.take():
            for listener in self._begun if listeners is None else listeners:
                listener.step(record)


def facts_of(
    job: Job,
    name: str,
    directory: str,
    total_steps: int,
    rows_per_step: int,
    config: Mapping[str, Any] | None = None,
) -> RunFacts:
    """The facts of a run that goes on from the job's present step."""
    predicted = job.plan.predicted
    return RunFacts(
        name=name,
        directory=directory,
        total_steps=total_steps,
        done_steps=job.step_count,
        rows_per_step=rows_per_step,
        predicted_s=predicted.step_s if predicted else None,
        limit_bytes=dict(predicted.budget_bytes) if predicted else {},
        config={"plan": job.plan.hash, "strategy": job.plan.strategy, "hardware": job.plan.hardware, **(config or {})},
    )
