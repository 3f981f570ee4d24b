"""Tells listeners of a job's run: the loop that trains calls one method after each thing that it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..compiler.job.job import Job
from ..compiler.search.offer import Offer
from .listener import Listener, OfferRecord, RunFacts
from .records import StepRecords


class Broadcast:
    """`begin` once the job is compiled or resumed, `stepped` after each `job.step`, `evaluated`, `offered`, and `end`,
    which comes in any case if the job is used in `telling`. Nothing here waits for a step."""

    def __init__(self, job: Job, listeners: Sequence[Listener], records: StepRecords | None = None):
        self.job, self.listeners = job, list(listeners)
        self.records = StepRecords(job) if records is None else records
        self._begun: list[Listener] = []

    def begin(self, run: RunFacts) -> None:
        """Raises the error of a listener that cannot begin, for example without its library."""
        for listener in self.listeners:
            listener.begin(run)
            self._begun.append(listener)

    def stepped(self, tokens: int) -> None:
        """The job has made a step of that many tokens. Tells of the steps that are known to have ended."""
        self.records.count_step(tokens)
        self.tell_ended()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """The job, at its present step, has these figures on held-out rows."""
        self.tell_ended()
        for listener in self._begun:
            listener.evaluated(self.job.step_count, metrics)

    def offered(self, offer: Offer, how: str) -> None:
        """There is a faster plan, and `how` says what takes it."""
        self.tell_ended()
        slow, before_s, after_s = offer.times, offer.before_s, offer.after_s
        told = OfferRecord(self.job.step_count, slow, before_s, after_s, offer.plan.hash, offer.describe(), how)
        for listener in self._begun:
            listener.offered(told)

    def tell_ended(self) -> None:
        """Tell of the steps that have ended, which after `job.last` are all."""
        for record in self.records.take():
            for listener in self._begun:
                listener.step(record)

    def flush(self) -> None:
        """Wait for the end of the last step, tell of it, and wait until listeners have shown and written all."""
        _ = self.job.last
        self.tell_ended()
        for listener in self._begun:
            listener.flush()

    def end(self, interrupted: bool = False) -> None:
        """Tell of the end, once; may be called again."""
        try:
            self.tell_ended()
        finally:
            begun, self._begun = self._begun, []
            for listener in begun:
                listener.end(interrupted)


@contextmanager
def telling(broadcast: Broadcast) -> Iterator[Broadcast]:
    """Listeners hear of the end however the body ends: of one that raises as of an interruption. Inside of the job's
    own `with`, as the last step is asked for."""
    try:
        yield broadcast
        _ = broadcast.job.last
    except BaseException:
        broadcast.end(interrupted=True)
        raise
    broadcast.end()


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
