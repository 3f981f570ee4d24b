"""Shares of the batch by speed: a lane of faster devices has more micro-batches, so that all lanes end together.

In: lanes, and blocks whose seconds on each device are known. Out: the number of micro-batches of each lane. The lanes
with the most come first, as the plan is made for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.costs.stage_time import block_seconds
from ...ir.errors import PassError
from ..decisions import Lanes
from ..draft import Draft


def lanes_by_speed(draft: Draft, equal: Lanes) -> Lanes:
    """The lanes with shares by speed; with equal ones where they are equally fast. Lanes that share stages, or are a
    team, have the same number, by the slowest of them. Raises `PassError` where micro-batches are too few, or cannot be
    divided so."""
    beside = equal.lanes_together
    groups = [equal.lanes[i : i + beside] for i in range(0, len(equal.lanes), beside)]
    device_s = _device_seconds(draft)
    seconds = [max(1 / sum(1 / device_s[d] for d in lane) for lane in group) for group in groups]
    count, each = draft.options.micro_batches, beside // equal.team  # each: micro-batches that a group runs at a time
    if count % each or count < each * len(groups):
        near = max(len(groups), round(count / each)) * each
        raise PassError(
            f"{count} micro-batches cannot be shared out by speed among {len(groups)} groups of {beside} lanes, which "
            f"run {each} at a time; the nearest micro_batches that can is {near}"
        )
    rows = sorted(zip(shares(count // each, seconds), groups), key=lambda row: -row[0])
    if len({share for share, _ in rows}) == 1:
        return equal
    lanes = [lane for _, group in rows for lane in group]
    numbers = [share for share, group in rows for _ in group]
    return equal.model_copy(update={"lanes": lanes, "micro_batches": numbers})


def shares(count: int, seconds: Sequence[float]) -> list[int]:
    """Share `count` micro-batches out among lanes that take these seconds for each: at least one a lane, and the last
    lane to end does so as early as it can."""
    found = [1] * len(seconds)
    for _ in range(count - len(seconds)):
        first = min(range(len(seconds)), key=lambda lane: (found[lane] + 1) * seconds[lane])
        found[first] += 1
    return found


def _device_seconds(draft: Draft) -> list[float]:
    """Seconds of each of the machine's devices for one micro-batch through all blocks."""
    precision, known = draft.options.precision, dict[str | int, float]()
    found = []
    for device, kind in zip(draft.machine.devices, draft.machine.device_kinds):
        measured = any(block.seconds for block in draft.blocks)  # by the name of a device
        key = device.name if measured else kind
        if key not in known:
            known[key] = sum(block_seconds(block, device, precision).both_s for block in draft.blocks)
        found.append(known[key])
    return found
