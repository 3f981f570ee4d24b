"""Contiguous stages by filling devices in turn, each with as much as it may take."""

from __future__ import annotations

import math

from ..draft import Draft
from .partition import StagesDecision
from .slices import Slices


def fill(slices: Slices, rounds: int, most_s: float = math.inf, most_blocks: int | None = None) -> list[list[int]]:
    """[first block, block after the last, turn] of each stage, or [] if some block finds no place.

    The devices come in turn, `rounds` times: turn t is that of `slices.order[t mod N]`. A device takes the most
    next blocks that fit its memory, take at most `most_s` and are at most `most_blocks`; a device that cannot take the
    next block is passed over.
    """
    length, count = len(slices.blocks), len(slices.order)
    stages: list[list[int]] = []
    start = 0
    for turn in range(rounds * count):
        last = length if most_blocks is None else min(length, start + most_blocks)
        end = start
        while (
            end < last
            and slices.stage_time_s(start, end + 1, turn) <= most_s
            and slices.fits(start, end + 1, turn, rounds * count)
        ):
            end += 1
        if end > start:
            stages.append([start, end, turn])
        if end == length:
            return stages
        start = end
    return []


def fewest_rounds(slices: Slices, most_blocks: int | None = None) -> int:
    """The fewest rounds over the devices in which all blocks fit. Raises `DoesNotFit`."""
    length = len(slices.blocks)
    counts = range(1, length + 1) if slices.fewest() is not None else ()
    found = next((n for n in counts if fill(slices, n, most_blocks=most_blocks)), None)
    if found is None:
        raise slices.does_not_fit([length])
    return found


def fill_devices(draft: Draft, most_blocks: int | None = None, inputs_leave: bool = False) -> StagesDecision:
    """The decision of `fill` in as few rounds as possible. Raises `DoesNotFit`."""
    slices, names = Slices(draft, inputs_leave=inputs_leave), [block.name for block in draft.blocks]
    found = fill(slices, fewest_rounds(slices, most_blocks), most_blocks=most_blocks)
    devices = [turn % draft.lane_hardware.num_devices for *_, turn in found]
    return {"stages": [names[a:b] for a, b, _ in found], "planned_for": devices}
