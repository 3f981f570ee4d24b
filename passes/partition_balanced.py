"""`partition-balanced`: blocks to contiguous stages of equal time, each within its device's memory.

In: blocks with costs. Out: `draft.partition` and `draft.stages`. Dynamic programming over contiguous cuts minimises
the slowest stage, `min max_j T_j` with `T_j = sum of forward and backward roofline seconds of its blocks`, where
stage j runs on device j mod N (so unequal GPUs get unequal stages). A stage is admitted if its weights, gradients,
one micro-batch's saved tensors and all micro-batches' inputs fit the device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from ..runtime.errors import DoesNotFit, PassError
from ..runtime.program import aligned, dtype_bytes
from ..runtime.units import format_bytes
from .base import Draft, Pass
from .blocks import Block, block_time_s
from .opgraph import value_tensors
from .stages import COMPUTE_DTYPES, build_stages


@dataclass(frozen=True)
class PartitionBalanced(Pass):
    """`stages`: how many; 0 takes the draft's option, and failing that the fewest per device that fit."""

    name: ClassVar[str] = "partition-balanced"
    needs: ClassVar[tuple[str, ...]] = ("blocks",)
    gives: ClassVar[tuple[str, ...]] = ("stages",)
    decides: ClassVar[str] = "stages"
    stages: int = 0

    def plan(self, draft: Draft) -> list[list[str]]:
        num_devices = draft.hardware.num_devices
        asked = self.stages or draft.options.stages or 0
        if asked > len(draft.blocks):
            raise PassError(
                f"stages={asked}, but {len(draft.blocks)} blocks allow at most {len(draft.blocks)}; ask for fewer"
            )
        slices = Slices(draft)
        counts = [asked] if asked else _counts(num_devices, len(draft.blocks))
        for count in counts:
            cuts = balanced_cuts(slices, count)
            if cuts is not None:
                names = [block.name for block in draft.blocks]
                return [names[a:b] for a, b in itertools.pairwise(cuts)]
        raise slices.does_not_fit(counts)

    def rewrite(self, draft: Draft, decision: list[list[str]]) -> None:
        draft.partition = decision
        draft.stages = build_stages(draft.graph, draft.blocks, decision)


def _counts(num_devices: int, num_blocks: int) -> list[int]:
    """Fewest stages first; each device gets the same number of stages, but for the last try: one block a stage."""
    counts = [n for n in range(num_devices, num_blocks + 1, num_devices)]
    return counts if counts and counts[-1] == num_blocks else [*counts, num_blocks]


class Slices:
    """Time and memory of blocks[a:b] as one stage on a device."""

    def __init__(self, draft: Draft):
        self.blocks: list[Block] = draft.blocks
        self.devices = draft.hardware.devices
        self.micro_batches = draft.options.micro_batches
        self.width = dtype_bytes(COMPUTE_DTYPES[draft.options.precision])
        self.time_s = [
            [0.0, *itertools.accumulate(block_time_s(block, device, draft.options.precision) for block in self.blocks)]
            for device in self.devices
        ]
        self.weights = [0, *itertools.accumulate(self.weight_bytes(block) for block in self.blocks)]
        self.kept = [0, *itertools.accumulate(self.block_kept(block) for block in self.blocks)]
        self.input_bytes = [
            sum(t.numel() * t.element_size() for n in block.inputs for t in value_tensors(n.meta.get("val")))
            for block in self.blocks
        ]

    def weight_bytes(self, block: Block) -> int:
        return aligned(block.param_bytes * self.width // 4)

    def block_kept(self, block: Block) -> int:
        saved = [
            t.numel() * t.element_size()
            for node, saved in zip(block.inputs, block.cost.saved_inputs)
            if saved
            for t in value_tensors(node.meta.get("val"))
        ]
        return block.cost.kept_bytes + sum(saved)

    def stage_time_s(self, a: int, b: int, stage: int) -> float:
        times = self.time_s[stage % len(self.devices)]
        return times[b] - times[a]

    def need_bytes(self, a: int, b: int) -> int:
        """Weights, gradients, one rematerialised micro-batch and the inputs of all micro-batches."""
        workspace = max(max(x.cost.backward_peak_bytes, x.cost.forward_peak_bytes) for x in self.blocks[a:b])
        weights = self.weights[b] - self.weights[a]
        return 2 * weights + self.kept[b] - self.kept[a] + workspace + self.micro_batches * self.input_bytes[a]

    def fits(self, a: int, b: int, stage: int) -> bool:
        return self.need_bytes(a, b) <= self.devices[stage % len(self.devices)].budget_bytes

    def does_not_fit(self, counts: list[int]) -> DoesNotFit:
        worst = max(range(len(self.blocks)), key=lambda i: self.need_bytes(i, i + 1))
        need = self.need_bytes(worst, worst + 1)
        budget = max(device.budget_bytes for device in self.devices)
        if need > budget:
            return DoesNotFit(
                f"block {self.blocks[worst].name!r} alone needs {format_bytes(need)} on a device; the largest has "
                f"{format_bytes(budget)}, missing {format_bytes(need - budget)}. Nearest that fits: devices of "
                f"{format_bytes(need)}, or more micro_batches (now {self.micro_batches})",
                memory="device",
                missing_bytes=need - budget,
            )
        return DoesNotFit(
            f"no contiguous partition into {', '.join(map(str, counts))} stages fits the devices' memories; "
            f"with {len(self.blocks)} stages (one block each) the largest needs {format_bytes(need)}",
            memory="device",
        )


def balanced_cuts(slices: Slices, count: int) -> list[int] | None:
    """Cut positions [0, ..., L] of `count` stages that minimise the slowest one, or None if none fits."""
    num_blocks = len(slices.blocks)
    best = [[math.inf] * (num_blocks + 1) for _ in range(count + 1)]
    back = [[0] * (num_blocks + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for stage in range(count):
        for end in range(stage + 1, num_blocks - (count - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                if best[stage][start] == math.inf:
                    continue
                time_s = slices.stage_time_s(start, end, stage)
                if time_s >= best[stage + 1][end]:
                    break  # longer stages only get slower
                if not slices.fits(start, end, stage):
                    break
                worst = max(best[stage][start], time_s)
                if worst < best[stage + 1][end]:
                    best[stage + 1][end], back[stage + 1][end] = worst, start
    if best[count][num_blocks] == math.inf:
        return None
    cuts = [num_blocks]
    for stage in range(count, 0, -1):
        cuts.append(back[stage][cuts[-1]])
    return cuts[::-1]
