"""The time of a run that failures cost, and the best interval between saves: in closed form, and by drawing failures.

A run makes steps for an interval, then a save holds them up. It counts as soon as it is written, while the next steps
are made. A failure takes the run back to the last save that counts, after a restart, which may fail as well. Failures
come at random, at one mean rate (an exponential distribution), so after each restart everything is as at first.

With M the mean time between failures, t the interval, s the stall of a save, w the time that writing takes after it and
R that of a restart, the share of the time in which steps are made that need not be made again is

    t / (M exp((R + w) / M) (exp((t + s) / M) - 1)).

For w = 0 this is the complete model of Daly, "A higher order estimate of the optimum checkpoint interval for restart
dumps" (FGCS 2006); w adds a factor, since a save is lost exactly where a failure comes before it counts. The best
interval is where the derivative is 0: (1 - t / M) exp((t + s) / M) = 1. Young's sqrt(2 s M) is its first order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

DRAWN = 100_000  # failures
HALVINGS = 80


@dataclass(frozen=True)
class FailingRun:
    """Seconds: between failures (the mean), of a save's stall, of its writing afterwards, and of a restart."""

    mtbf_s: float
    stall_s: float
    write_s: float
    restart_s: float

    def useful_share(self, interval_s: float) -> float:
        """The share of the time that makes progress, with saves after each `interval_s` of steps; in closed form. A
        save waits for the one before, so `interval_s` and the stall take at least `write_s` together."""
        m = self.mtbf_s
        exponent = (interval_s + self.stall_s + self.restart_s + self.write_s) / m
        if exponent > 700:  # nothing would ever be finished
            return 0.0
        return interval_s / m * math.exp(-exponent) / -math.expm1(-(interval_s + self.stall_s) / m)

    @property
    def best_interval_s(self) -> float:
        """The interval with the largest useful share."""
        low, high = 0.0, self.mtbf_s
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            grows = 1 - middle / self.mtbf_s > math.exp(-(middle + self.stall_s) / self.mtbf_s)
            low, high = (middle, high) if grows else (low, middle)
        return max(low, self.write_s - self.stall_s)

    def best_steps(self, step_s: float) -> int:
        """The number of steps between saves with the largest useful share."""
        least = max(1, math.ceil((self.write_s - self.stall_s) / step_s))
        near = self.best_interval_s / step_s
        counts = (max(least, math.floor(near)), max(least, math.ceil(near)))
        return max(counts, key=lambda count: self.useful_share(count * step_s))


@dataclass(frozen=True)
class TimeShares:
    """The shares of a run's time: steps that count, stalls of saves that count, work that is lost, restarts."""

    useful: float
    saves: float
    lost: float
    restarts: float


def draw_failures(run: FailingRun, interval_s: float, *, failures: int = DRAWN, seed: int = 0) -> TimeShares:
    """Simulate a run until it has failed so often."""
    draw = np.random.default_rng(seed)
    turn_s = interval_s + run.stall_s
    apart_s = draw.exponential(run.mtbf_s, failures)  # from a failure to the next one
    until_s = np.maximum(apart_s - run.restart_s, 0.0)  # of these after the restart; 0 if that failed
    saves = np.floor(until_s / turn_s)
    saves -= (saves > 0) & (until_s - saves * turn_s < run.write_s)  # the last one did not count yet
    useful_s, saves_s = float(saves.sum()) * interval_s, float(saves.sum()) * run.stall_s
    restarts_s = float(np.minimum(apart_s, run.restart_s).sum())
    lost_s = float(until_s.sum()) - useful_s - saves_s
    whole_s = float(apart_s.sum())
    return TimeShares(useful_s / whole_s, saves_s / whole_s, lost_s / whole_s, restarts_s / whole_s)
