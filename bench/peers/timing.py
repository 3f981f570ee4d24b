"""Times two or more sides fairly on a machine that others may use, too: the sides take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each side's runs. Each round has one run of each side, every other round in reverse order."""
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, rounds):
        for name, run in sorted(sides.items(), reverse=number % 2 == 1):
            begin_s = time.perf_counter()
            run()
            if number >= 0:
                times_s[name].append(time.perf_counter() - begin_s)
    return times_s


def whole_step(job: Any, batch: Any) -> float:
    """The loss of one step of a job, once the step has ended: its end must not fall into another side's time."""
    loss = float(job.step(batch))
    assert job.last is not None
    return loss
