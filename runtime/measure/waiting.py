"""The time that a thread has waited for a core: a busy machine adds it, and no plan can foresee it."""

from __future__ import annotations

from pathlib import Path

SCHEDULE_STATISTICS = Path("/proc/thread-self/schedstat")


def waited_s(statistics: Path = SCHEDULE_STATISTICS) -> float:
    """Seconds that this thread has been ready to run while something else had the core; 0 if the kernel keeps no such
    account."""
    fields = statistics.read_text().split() if statistics.is_file() else []
    return int(fields[1]) / 1e9 if len(fields) > 1 else 0.0
