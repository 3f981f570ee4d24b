"""`partition-balanced`: blocks to contiguous stages of equal time, each within its device's memory.

In: blocks with costs. Out: `draft.partition` and `draft.stages`. Dynamic programming over contiguous cuts minimises
the slowest stage, `min max_j T_j` with `T_j = sum of forward and backward roofline seconds of its blocks`, where
stage j runs on device j mod N (so unequal GPUs get unequal stages). A stage is admitted if its weights, gradients,
one rematerialised micro-batch and all micro-batches' inputs, those of the device's other stages too, fit the device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar

from ..runtime.errors import DoesNotFit, PassError
from ..runtime.units import format_bytes
from .base import Draft, Pass
from .blocks import Block, block_time_s, compute_dtype
from .stage_costs import storages
from .stages import build_stages


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
        fewest = slices.fewest()
        for count in counts:
            cuts = balanced_cuts(slices, count) if fewest is not None and count >= fewest else None
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


@dataclass(frozen=True)
class Need:
    """Device memory of some consecutive blocks as one stage."""

    work_bytes: int  # weights, gradients, saved tensors of one micro-batch, and the workspace of one block
    input_bytes: int  # what enters, of one micro-batch

    def total_bytes(self, micro_batches: int, rounds: int) -> int:
        """With the inputs of all micro-batches for each of the device's `rounds` stages, taken as alike, and two
        gradients of the size of an input."""
        return self.work_bytes + (micro_batches * rounds + 2) * self.input_bytes


class Slices:
    """Time and memory of blocks[a:b] as one stage on a device."""

    def __init__(self, draft: Draft):
        self.blocks = draft.blocks
        self.devices = draft.hardware.devices
        self.micro_batches = draft.options.micro_batches
        self.time_s = [
            [0.0, *itertools.accumulate(block_time_s(block, device, draft.options.precision) for block in self.blocks)]
            for device in self.devices
        ]
        parameters = [_parameters(draft, block) for block in self.blocks]
        self.needs = [_needs_before(self.blocks, parameters, end) for end in range(len(self.blocks) + 1)]

    def stage_time_s(self, a: int, b: int, stage: int) -> float:
        times = self.time_s[stage % len(self.devices)]
        return times[b] - times[a]

    def need_bytes(self, a: int, b: int, count: int) -> int:
        """Of blocks[a:b] as one of `count` stages."""
        return self.needs[b][a].total_bytes(self.micro_batches, -(-count // len(self.devices)))

    def fits(self, a: int, b: int, stage: int, count: int) -> bool:
        return self.need_bytes(a, b, count) <= self.devices[stage % len(self.devices)].budget_bytes

    def fewest(self) -> int | None:
        """No partition that fits has fewer stages; None if a block alone is too large for every device."""
        budget = max(device.budget_bytes for device in self.devices)
        count = start = 0
        while start < len(self.blocks):
            ends = range(len(self.blocks), start, -1)
            start = next((end for end in ends if self.needs[end][start].work_bytes <= budget), -1)
            if start < 0:
                return None
            count += 1
        return count

    def does_not_fit(self, counts: list[int]) -> DoesNotFit:
        budget = max(device.budget_bytes for device in self.devices)
        needs = [self.need_bytes(i, i + 1, counts[-1]) for i in range(len(self.blocks))]
        need, name = max(zip(needs, (block.name for block in self.blocks)), key=lambda row: row[0])
        if need > budget:
            return DoesNotFit(
                f"block {name!r} alone needs {format_bytes(need)} on a device; the largest has {format_bytes(budget)}, "
                f"missing {format_bytes(need - budget)}. Nearest that fits: devices of {format_bytes(need)}, or more "
                f"micro_batches (now {self.micro_batches}), which are smaller",
                memory="device",
                missing_bytes=need - budget,
            )
        return DoesNotFit(
            f"no contiguous partition into {', '.join(map(str, counts))} stages fits the devices' memories; the "
            f"largest block alone needs {format_bytes(need)} of {format_bytes(budget)}. Nearest that fits: "
            f"stages={len(needs)}, one block each, or devices with more memory",
            memory="device",
        )


def _parameters(draft: Draft, block: Block) -> dict[int, int]:
    """Identity of each parameter to the bytes of its weight and its gradient."""
    graph = draft.graph
    found = [p for node in block.nodes for p in graph.node_parameters(node).values()]
    return {id(p): p.numel() * compute_dtype(graph, p).itemsize * (1 + p.requires_grad) for p in found}


def _needs_before(blocks: list[Block], parameters: list[dict[int, int]], end: int) -> list[Need]:
    """Per start a < `end` the need of blocks[a:end]: the slice grows to the front, block by block."""
    sent = {node for block in blocks for node in block.outputs}
    needs: list[Need] = []
    weights: dict[int, int] = {}
    inputs: dict[int, int] = {}
    saved: dict[int, int] = {}  # values between blocks, and shared ones
    kept = workspace = 0
    for i in reversed(range(end)):
        block, cost = blocks[i], blocks[i].cost
        made = storages(block.outputs)
        inputs = {key: size for key, size in inputs.items() if key not in made}
        inputs |= storages(node for node in block.inputs if node in sent or node.op == "placeholder")
        counted = storages(node for node, is_saved in zip(block.outputs, cost.saved_outputs) if is_saved)
        saved = {key: size for key, size in saved.items() if key not in counted}
        saved |= storages(node for node, is_saved in zip(block.inputs, cost.saved_inputs) if is_saved)
        kept += cost.kept_bytes
        weights |= parameters[i]
        workspace = max(workspace, cost.backward_peak_bytes, cost.forward_peak_bytes - cost.kept_bytes)
        between = sum(size for key, size in saved.items() if key not in inputs)
        needs.append(Need(sum(weights.values()) + kept + between + workspace, sum(inputs.values())))
    return needs[::-1]


def balanced_cuts(slices: Slices, count: int) -> list[int] | None:
    """Cut positions [0, ..., L] of `count` stages that minimise the slowest one, or None if none fits."""
    num_blocks = len(slices.blocks)
    best = [[math.inf] * (num_blocks + 1) for _ in range(count + 1)]
    back = [[0] * (num_blocks + 1) for _ in range(count + 1)]
    best[0][0] = 0.0
    for stage in range(count):
        for end in range(stage + 1, num_blocks - (count - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                time_s = slices.stage_time_s(start, end, stage)
                if time_s >= best[stage + 1][end]:
                    break  # longer stages only get slower
                worst = max(best[stage][start], time_s)
                if worst < best[stage + 1][end] and slices.fits(start, end, stage, count):
                    best[stage + 1][end], back[stage + 1][end] = worst, start
    if best[count][num_blocks] == math.inf:
        return None
    cuts = [num_blocks]
    for stage in range(count, 0, -1):
        cuts.append(back[stage][cuts[-1]])
    return cuts[::-1]
