"""Looks in some steps of a run whether a device is slower than planned, and asks for a plan that gives it less."""

from __future__ import annotations

from statistics import median

from ..compiler.job.job import Job
from ..compiler.search.offer import OFFER_S, Offer
from ..runtime.simulate import Timeline

LOOKED = 5  # the number of steps one after another by whose median is judged
WARM_STEPS = 10  # of a run, before the first look
LATER = 2  # the next look is after this factor of the steps


class StragglerWatch:
    """`stepped` after each step, on all ranks. The first look is after `WARM_STEPS`, the next ones after twice the
    steps each, until there is an offer: a run gets at most one.

    total_steps: of the run. Near its end nothing is looked for: what planning takes would not come back.
    """

    def __init__(self, job: Job, total_steps: int):
        self.job, self.total_steps = job, total_steps
        self._steps, self._next = 0, WARM_STEPS
        self._seen: list[Timeline] = []
        self._over = job.folder.interface.world_size == 1  # a device alone is slower than nothing

    def offer_after_step(self) -> Offer | None:
        """The offer, after the step that ends a look in which a slow device was found and a faster plan for the machine
        as it is. Waits for the end of the steps it looks at, and plans for up to 20 s where a device is slow."""
        self._steps += 1
        if self._over or self._steps <= self._next:
            return None
        self._seen.append(self.job.timeline())
        if len(self._seen) < LOOKED:
            return None
        seen, self._seen, self._next = self._seen, [], LATER * self._steps
        left_s = (self.total_steps - self.job.step_count) * median(timeline.step_s for timeline in seen)
        if self.job.of_all_ranks(left_s)[0] <= OFFER_S:
            return None
        found = self.job.offer(seen)
        self._over = found is not None
        return found
