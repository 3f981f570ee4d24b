"""Partitioners: passes that decide which blocks make a stage, and for which device each stage is cut.

In: `draft.blocks`. Out: `draft.partition`, `draft.planned_for` and `draft.stages`. A contiguous partition cuts stage j
for the j-th device of an order, modulo the number of devices; the others choose the device of each stage themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...graph.divide.exchanges import cut_at_borders
from ...graph.stages import build_stages
from ...ir.errors import PassError
from ..base import Pass, PlanSoFar
from ..decisions import Decision
from ..draft import Draft

FEW_BLOCKS = 32  # up to this number, or eight a device, the search tries stages of every size
StagesDecision = dict[str, Any]  # {"stages": list[list[str]], "planned_for": list[int]}


@dataclass(frozen=True)
class Partition(Pass):
    """Base of all partitioners: they differ in `cut`. Where members of a team exchange values, stages are cut, too."""

    needs: ClassVar[tuple[str, ...]] = ("blocks",)
    gives: ClassVar[tuple[str, ...]] = ("stages",)
    rank: ClassVar[int] = 39
    decides: ClassVar[tuple[Decision, ...]] = (
        Decision("stages", list[list[str]]),  # stage -> its blocks
        Decision("planned_for", list[int]),  # stage -> the device whose speed and memory it was cut for
    )

    def with_stages(self, number: int) -> Partition | None:
        """This partitioner, asked for a number of stages; None where it chooses the number itself."""
        return None

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        """One or two stages more and fewer; none of few blocks, for which the search tries many numbers anyway."""
        own = best.find(cls)
        if own is None or best.end is None or not best.is_short or best.is_shared or has_few_blocks(best.end):
            return []
        number, most = len(best.end.stages), len(best.end.blocks)
        wanted = [n for n in (number - 1, number + 1, number - 2, number + 2) if 0 < n <= most]
        return [other for n in wanted if (other := own.with_stages(n)) is not None]

    def plan(self, draft: Draft) -> StagesDecision:
        found = self.cut(draft)
        nodes = {block.name: block.nodes for block in draft.blocks}
        pieces = [cut_at_borders((name, nodes[name]) for name in stage) for stage in found["stages"]]
        planned_for = [device for device, cut in zip(found["planned_for"], pieces) for _ in cut]
        return {**found, "stages": [piece for cut in pieces for piece in cut], "planned_for": planned_for}

    def cut(self, draft: Draft) -> StagesDecision:
        """The stages that divide the work best."""
        raise NotImplementedError

    def rewrite(self, draft: Draft, decision: StagesDecision | list[list[str]]) -> None:
        """`decision` may be the stages alone, which are then cut for the devices in turn."""
        stages = decision if isinstance(decision, list) else decision["stages"]
        count = draft.lane_hardware.num_devices
        devices = [j % count for j in range(len(stages))] if isinstance(decision, list) else decision["planned_for"]
        if len(devices) != len(stages):
            raise PassError(f"planned_for has {len(devices)} entries, there are {len(stages)} stages")
        wrong = [d for d in devices if not 0 <= d < count]
        if wrong:
            raise PassError(f"planned_for names device {wrong[0]}; there are 0 to {count - 1}")
        draft.partition, draft.planned_for = stages, list(devices)
        draft.stages = build_stages(draft.graph, draft.blocks, stages)


def has_few_blocks(draft: Draft) -> bool:
    return len(draft.blocks) <= max(FEW_BLOCKS, 8 * draft.lane_hardware.num_devices)


def asked_stages(draft: Draft, option: int) -> int:
    """A pass's option `stages`; 0 leaves the number open. Raises `PassError` below 0 and above the number of blocks."""
    most = len(draft.blocks)
    if not 0 <= option <= most:
        raise PassError(f"stages={option}, but {most} blocks allow at most {most}: 1 to {most}, or 0 to leave it open")
    return option


def contiguous(draft: Draft, cuts: Sequence[int], order: Sequence[int] | None = None) -> StagesDecision:
    """The decision for cut positions [0, ..., L] over the draft's blocks; stage j is for `order[j mod N]`."""
    names = [block.name for block in draft.blocks]
    order = range(draft.lane_hardware.num_devices) if order is None else order
    stages = [names[a:b] for a, b in itertools.pairwise(cuts)]
    return {"stages": stages, "planned_for": [order[j % len(order)] for j in range(len(stages))]}


def device_order(text: str, num_devices: int, some: bool = False) -> list[int]:
    """The option `order` as device numbers: "2 0 1"; empty: 0, 1, 2. Raises `PassError` unless each device comes once;
    with `some`, devices may be left out."""
    if not text:
        return list(range(num_devices))
    parts = text.split()
    order = [int(part) for part in parts if part.isdecimal()]
    known = len(order) == len(parts) and len(set(order)) == len(order) and set(order) <= set(range(num_devices))
    if not known or (len(order) < num_devices and not some):
        raise PassError(f"order={text!r}; it names each of the devices 0 to {num_devices - 1} once, such as '1 0'")
    return order
