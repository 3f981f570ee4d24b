"""`partition-balanced`: blocks to contiguous stages of equal time, each within its device's memory.

In: blocks with costs. Out: `draft.partition` and `draft.stages`. Dynamic programming over contiguous cuts minimises
the slowest stage, `min max_j T_j` with `T_j = sum of forward and backward roofline seconds of its blocks`, where
stage j runs on device j mod N (so unequal GPUs get unequal stages). A stage is admitted if its weights, gradients,
one rematerialised micro-batch and all micro-batches' inputs, those of the device's other stages too, fit the device.

Parts of a layer of experts read the same rows, and each adds its own to the sum of the parts before it: one value of
rows for each part. With `together` all stages of such a layer run on one device, so that rows neither travel nor take
room on several devices, and the next layer runs on the next device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from ...graph.blocks import Block
from ...graph.opgraph import OpGraph
from ...ir.errors import PassError
from ..draft import Draft
from .layer_parts import goes_on
from .partition import Partition, StagesDecision, asked_stages, contiguous, device_order
from .slices import Slices


@dataclass(frozen=True)
class PartitionBalanced(Partition):
    """`stages`: the number of stages; 0: the fewest per device that fit. `order`: the devices of the first stages, such
    as "1 0", while all others stay idle; without it, all as they are numbered. `inputs_leave`: for pipelines that move
    what enters a stage to DRAM or SSD until its backward. `asynchronous`: for `schedule-async`, where all but the last
    stage compute their forward again, so that the last one may be larger. `together`: one device runs all parts of a
    layer of experts, or of a table; of equal devices only."""

    name: ClassVar[str] = "partition-balanced"
    rank: ClassVar[int] = 30
    stages: int = 0
    order: str = ""
    inputs_leave: bool = False
    asynchronous: bool = False
    together: bool = False

    def with_stages(self, number: int) -> Partition:
        return replace(self, stages=number)

    def cut(self, draft: Draft) -> StagesDecision:
        asked = asked_stages(draft, self.stages)
        order = device_order(self.order, draft.lane_hardware.num_devices, some=True)
        kinds = {draft.lane_hardware.device_kinds[device] for device in order}
        if self.together and len(kinds) > 1:
            raise PassError(
                f"{self.name}: together=true needs equal devices; found {len(kinds)} kinds. Nearest that may do: "
                f"order='{order[0]}' names one device, and without together each stage is cut for its own"
            )
        slices = Slices(draft, order, self.inputs_leave, self.asynchronous)
        counts = [asked] if asked else _counts(len(order), len(draft.blocks))
        fewest = slices.fewest()
        for count in counts:
            if fewest is None:
                break
            if count < fewest:
                continue
            cuts = balanced_cuts(slices, count)
            if cuts is None:
                fewest = slices.fewest(count)
            else:
                found = contiguous(draft, cuts, order)
                if not self.together:
                    return found
                stages = [draft.blocks[begin:end] for begin, end in itertools.pairwise(cuts)]
                return {**found, "planned_for": layer_by_layer(draft.graph, stages, order)}
        raise slices.does_not_fit(counts)


def layer_by_layer(graph: OpGraph, stages: Sequence[Sequence[Block]], order: Sequence[int]) -> list[int]:
    """The device of each stage, given by its blocks: the next one of the order for each stage, but for those that go on
    with the layer of experts, or the table, that the stage before has a part of, or that have a part of its layer."""
    moves = (not goes_on(graph, before[-1], stage[0]) for before, stage in itertools.pairwise(stages))
    return [order[place % len(order)] for place in itertools.accumulate(moves, initial=0)]


def _counts(num_devices: int, num_blocks: int) -> list[int]:
    """Numbers of stages to try, fewest first: multiples of the number of devices, and as the last one block a stage."""
    counts = [n for n in range(num_devices, num_blocks + 1, num_devices)]
    return counts if counts and counts[-1] == num_blocks else [*counts, num_blocks]


def balanced_cuts(slices: Slices, count: int) -> list[int] | None:
    """Cut positions [0, ..., L] of `count` stages that minimise the slowest one, or None if none fits. All stages of a
    width are looked at together, narrow ones first; of equal cuts the one with the narrowest last stages wins."""
    num_blocks = len(slices.blocks)
    earliest = np.array(slices.earliest)
    best_s = np.full((count + 1, num_blocks + 1), np.inf)
    back = np.zeros((count + 1, num_blocks + 1), dtype=np.int64)
    best_s[0, 0] = 0.0
    for stage in range(count):
        row_s = best_s[stage + 1]
        last = num_blocks - (count - stage - 1)
        for width in range(1, last - stage + 1):
            starts = np.arange(stage, last - width + 1)
            ends = starts + width
            times_s = slices.times_s(starts, width, stage)
            able = (starts >= earliest[ends]) & (times_s < row_s[ends])
            if not able.any():
                break  # wider stages only get slower and larger
            slowest_s = np.maximum(best_s[stage, starts], times_s)
            better = np.flatnonzero(able & (slowest_s < row_s[ends]))
            better = better[slices.fitting(starts[better], width, stage, count)]
            row_s[ends[better]], back[stage + 1, ends[better]] = slowest_s[better], starts[better]
    if best_s[count, num_blocks] == math.inf:
        return None
    cuts = [num_blocks]
    for stage in range(count, 0, -1):
        cuts.append(int(back[stage, cuts[-1]]))
    return cuts[::-1]
