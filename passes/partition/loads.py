"""Seconds, bytes and messages of any sets of blocks as stages, for partitioners whose stages need not be runs.

In: a draft with blocks. Blocks are named by their index in `draft.blocks`, which is a topological order; a stage is an
ascending tuple of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

from torch import fx

from ...graph.boundaries import narrow_nodes, value_bytes
from ...graph.costs.stage_time import MessageTimes, block_seconds
from ...graph.opgraph import value_tensors
from ...ir.errors import DoesNotFit
from ...ir.units import format_bytes
from ..draft import Draft
from .partition import StagesDecision
from .slices import BlockRow, StageNeed, gradient_and_weight_bytes, needs_to_front

BlockIds = tuple[int, ...]


class Loads:
    """The costs of blocks and their messages to each other. `reads[i]`: the values of other blocks that block i
    reads."""

    def __init__(self, draft: Draft):
        self.blocks, self.hardware = draft.blocks, draft.lane_hardware
        self.devices = draft.lane_hardware.devices
        self.micro_batches = draft.options.micro_batches
        precision = draft.options.precision
        self.time_s = [[block_seconds(b, d, precision).both_s for b in self.blocks] for d in self.devices]
        home = self.home = {node: i for i, block in enumerate(self.blocks) for node in block.nodes}
        self.reads = [[node for node in block.inputs if node in home] for block in self.blocks]
        self.readers: dict[fx.Node, list[int]] = defaultdict(list)
        for i, nodes in enumerate(self.reads):
            for node in nodes:
                self.readers[node].append(i)
        self.before = [{home[node] for node in nodes} for nodes in self.reads]
        self.after: list[set[int]] = [set() for _ in self.blocks]
        for i, makers in enumerate(self.before):
            for maker in makers:
                self.after[maker].add(i)
        sent = {node for block in self.blocks for node in block.outputs}
        self._rows = [BlockRow.from_block(b, gradient_and_weight_bytes(draft, b), sent) for b in self.blocks]
        self._needs: dict[BlockIds, StageNeed] = {}
        self._graph, self._narrow = draft.graph, narrow_nodes(draft.graph)
        self._messages = MessageTimes(draft.lane_hardware)

    def need(self, stage: BlockIds) -> StageNeed:
        """Device memory of these blocks as one stage."""
        if stage not in self._needs:
            self._needs[stage] = needs_to_front([self._rows[i] for i in stage])[0]
        return self._needs[stage]

    def need_bytes(self, stages: Sequence[BlockIds]) -> int:
        """Memory of one device with these stages, swapped one by one: the largest of them, with the inputs of all."""
        needs = [self.need(stage) for stage in stages]
        held = self.micro_batches * sum(need.input_bytes for need in needs)
        return held + max((need.work_bytes + 2 * need.input_bytes for need in needs), default=0)

    def fits(self, stages: Sequence[BlockIds], device: int) -> bool:
        return self.need_bytes(stages) <= self.devices[device].budget_bytes

    def value_bytes(self, node: fx.Node) -> int:
        """Bytes of a value and, where it is trained, its gradient; each is sent once per reading device."""
        if node in self._narrow:
            return 2 * value_bytes(self._graph, node, self._narrow)
        tensors = value_tensors(node.meta.get("val"))
        return sum(t.numel() * t.element_size() * (1 + t.requires_grad) for t in tensors)

    def message_s(self, src: int, dst: int, num_bytes: float) -> float:
        """Seconds to send `num_bytes`, values and their gradients together, between two devices."""
        return self._messages.seconds(src, dst, num_bytes, count=2) if num_bytes else 0.0

    def crossing_bytes(self) -> list[int]:
        """Per cut position 0 to L the bytes that are made before it and read after it."""
        change = [0] * (len(self.blocks) + 1)
        for node, readers in self.readers.items():
            size = self.value_bytes(node)
            change[self.home[node] + 1] += size
            change[max(readers) + 1] -= size
        return list(itertools.accumulate(change))

    def does_not_fit(self, stages: Sequence[BlockIds], device: int, why: str) -> DoesNotFit:
        """The error for a device that does not hold these stages. `why`: the partitioner's name."""
        need, budget = self.need_bytes(stages), self.devices[device].budget_bytes
        largest = max(stages, key=lambda stage: self.need(stage).work_bytes)
        names = [self.blocks[i].name for i in largest]
        what = f"block {names[0]!r} alone" if len(names) == 1 else f"{len(names)} blocks from {names[0]!r}"
        return DoesNotFit(
            f"{why}: {what} and {len(stages) - 1} other stages need {format_bytes(need)} on "
            f"{self.devices[device].name}, which has {format_bytes(budget)}, missing {format_bytes(need - budget)}. "
            f"Nearest that fits: devices of {format_bytes(need)}, or more micro_batches (now {self.micro_batches}), "
            "which are smaller",
            memory=self.devices[device].name,
            missing_bytes=need - budget,
        )


def decision_of(draft: Draft, stages: Sequence[BlockIds], devices: Sequence[int]) -> StagesDecision:
    """Stages in topological order, each for its device, as a partitioner's decision."""
    names = [block.name for block in draft.blocks]
    return {"stages": [[names[i] for i in stage] for stage in stages], "planned_for": list(devices)}
