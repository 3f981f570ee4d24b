"""Timing two or more sides fairly on a machine that others may be using too: turn by turn, medians."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def alternate(sides: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each side's runs, one run of each per round, every other round in reverse order."""
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(-warm_up, rounds):
        for name, run in sorted(sides.items(), reverse=number % 2 == 1):
            begin_s = time.perf_counter()
            run()
            if number >= 0:
                times_s[name].append(time.perf_counter() - begin_s)
    return times_s
