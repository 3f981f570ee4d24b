"""`insert-optimizer`: the gradients that the programs return are reduced, clipped and used.

In: programs whose results hold every stage's gradients. Out: programs that update the weights. A stage that lives in
DRAM offloads its gradients as soon as its last backward is done and is stepped there, on fp32 master weights, under the
backward of the stages before it (Mobius eq. 1), after the offload of the next stage where DRAM has room for two stages'
gradients; a resident stage is stepped on its device, at the end, when that waits for other devices least. The parts of
a tied parameter are summed across the stages that share it (`all_reduce` over one group per parameter), and each stage
then updates its own copy by the same arithmetic. Clipping needs the norm over all devices: every step waits for it.

Where every device runs the whole model, the gradients of a stage are summed over the devices right after its last
backward (`all_reduce`), and each device steps its own copy; where stages are spread over the devices, the sum is
scattered (`reduce_scatter`) and each device offloads and steps its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...ir import ops
from ...ir.errors import PassError
from ...ir.program import homes_of
from ..base import Pass
from ..decisions import OPTIMIZER, Decision
from ..draft import Draft
from .dram_room import choose_timings
from .timing import Timing, updates_of
from .updates import write_updates

TIMINGS = (Timing(lag=1), Timing(lag=0))


@dataclass(frozen=True)
class InsertOptimizer(Pass):
    name: ClassVar[str] = "insert-optimizer"
    rank: ClassVar[int] = 70
    needs: ClassVar[tuple[str, ...]] = ("programs", "tiers")
    gives: ClassVar[tuple[str, ...]] = ("optimizer",)
    decides: ClassVar[tuple[Decision, ...]] = (OPTIMIZER,)

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return []

    def plan(self, draft: Draft) -> dict[str, str]:
        """The memory in which each stage is stepped: "device" with resident weights, "dram" with swapped ones."""
        if draft.ssd.stages:
            raise PassError(f"{self.name} knows nothing of SSDs, where insert-ssd puts stages; use overlap-optimizer")
        return stepped_where(draft)

    def rewrite(self, draft: Draft, decision: dict[str, str]) -> None:
        require_where(decision, self.plan(draft))
        updates = updates_of(draft, decision)
        write_updates(draft.programs, draft.lane_hardware, updates, choose_timings(draft, updates, TIMINGS))


def stepped_where(draft: Draft) -> dict[str, str]:
    """The memory of each stage's states, in stage order: that of its weights, or where `insert-ssd` puts them."""
    where: dict[str, str] = {}
    for program in draft.programs:
        for stage, home in homes_of(program).items():
            there = ops.SSD if stage in draft.ssd.stages else home.weights
            where.setdefault(stage, ops.DEVICE if program.interface.stages[stage].staying else there)
    return {stage.spec.name: where[stage.spec.name] for stage in draft.stages if stage.spec.name in where}


def require_where(decision: dict[str, str], own: dict[str, str]) -> None:
    """Raise `PassError` where a plan steps a stage elsewhere than its states are."""
    how = {ops.DEVICE: "resident", ops.DRAM: "fetched", ops.SSD: "on SSD"}
    for stage, memory in own.items():
        if stage not in decision:
            raise PassError(f"optimizer says nothing of {stage}; it is stepped on {memory}")
        if decision[stage] != memory:
            raise PassError(
                f"{stage} is {how[memory]}, so it is stepped on {memory}; optimizer says {decision[stage]!r}"
            )
