"""Divides a step's time on each device: computation, optimizer, transfers that nothing covers, and waiting."""

from __future__ import annotations

from collections.abc import Iterable

from ....ir import ops
from ....runtime.simulate import Span
from ....runtime.simulate.time_ranges import length, union

KINDS = ("computation", "optimizer", "exposed transfers", "bubble")


def spent_seconds(spans: Iterable[Span], num_devices: int, step_s: float) -> list[dict[str, float]]:
    """Seconds of each kind on each device, which add up to the step. Where several kinds go on at once, the first of
    `KINDS` counts."""
    by_device: list[list[Span]] = [[] for _ in range(num_devices)]
    for span in spans:
        by_device[span.device].append(span)
    found = []
    for own in by_device:
        computing = union((s.start_s, s.end_s) for s in own if s.stream == ops.COMPUTE)
        stepping = union([*computing, *((s.start_s, s.end_s) for s in own if s.stream == ops.CPU)])
        moving = union([*stepping, *((s.start_s, s.end_s) for s in own)])
        covered = [length(each) for each in (computing, stepping, moving)]
        parts = [covered[0], covered[1] - covered[0], covered[2] - covered[1], max(0.0, step_s - covered[2])]
        found.append(dict(zip(KINDS, parts)))
    return found
