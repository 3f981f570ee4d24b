"""Seconds that spans cover: each counts once, however many spans go on in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TimeRange = tuple[float, float]


def union(ranges: Iterable[TimeRange]) -> list[TimeRange]:
    """The same seconds as ranges in order that do not overlap."""
    found: list[TimeRange] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def length(ranges: Iterable[TimeRange]) -> float:
    return sum(end - start for start, end in ranges)


def overlap(first: Sequence[TimeRange], second: Sequence[TimeRange]) -> float:
    """The seconds that both cover; each as `union` gives it."""
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
