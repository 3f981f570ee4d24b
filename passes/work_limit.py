"""Work as it is counted where the time for it is limited: in seconds, but by what was done and not by a clock.

A clock, also that of a process, runs faster where other processes have the caches and the other half of a core. A limit
by what was done is reached at the same place on every machine at any load, so the same wishes give the same plan. The
seconds of a piece of work are about those on one core of a server of 2020 that has nothing else to do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class WorkDone:
    """The work done so far, in seconds."""

    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
