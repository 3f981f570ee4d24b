"""`insert-shard`: every device keeps a part of each of its stages in its host's DRAM and has a stage whole only while
it runs (MiCS 3.2; over all devices ZeRO-3 with CPU offload: Mobius section 2.2 and eq. 2).

In: programs of a lane whose stages are shared with other lanes, on resident weights. Out: the same programs in which
each phase of a stage begins with a `fetch` of the device's shard and an `all_gather` over those that share it. Both are
issued at the start of the phase before, if both stages fit beside the activations; their places in the arena keep them
from running further ahead. `insert-optimizer` then scatters the sum of each stage's gradients, and every device steps
its shard on the CPU.

A shard holds a piece of every parameter, not of the stage's memory as a whole: parameters that are tied across stages
are cut alike, so their gradients are added shard by shard on each device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..runtime import ops
from ..runtime.errors import PassError
from ..runtime.memory import profile_memory
from ..runtime.program import Program, infer_all, place_frees
from .base import Draft, Pass
from .insert_fetch import Early, fetched_phases, hand_over, phases


@dataclass(frozen=True)
class InsertShard(Pass):
    """`prefetch`: whether to gather one phase ahead."""

    name: ClassVar[str] = "insert-shard"
    needs: ClassVar[tuple[str, ...]] = ("programs", "mesh", "remat")
    gives: ClassVar[tuple[str, ...]] = ("tiers",)
    decides: ClassVar[str] = "fetch"
    prefetch: bool = True

    def plan(self, draft: Draft) -> Early:
        """Per stage the phases that come one phase early."""
        require_shards(self, draft)
        early: Early = {s.spec.name: {} for s in draft.stages if s.spec.params}
        ahead: Early = {name: dict.fromkeys(("forward", "backward"), _count(draft, name)) for name in early}
        fits = self.prefetch and all(
            _peak_bytes(program, ahead) <= draft.hardware.devices[program.device].budget_bytes
            for program in draft.programs
        )
        return ahead if fits else early

    def rewrite(self, draft: Draft, early: Early) -> None:
        require_shards(self, draft)
        wanted = {s.spec.name for s in draft.stages if s.spec.params}
        if set(early) != wanted:
            odd = min(set(early) ^ wanted)
            raise PassError(f"fetch names {', '.join(early)}; with insert-shard it names every stage, so also {odd!r}")
        for stage, kinds in early.items():
            if any(count != _count(draft, stage) for count in kinds.values()):
                raise PassError(
                    f"fetch of {stage} is {kinds}; a shard comes as a whole, {_count(draft, stage)} parameters"
                )
        for program in draft.programs:
            gather_weights(program, early)


def require_shards(p: Pass, draft: Draft) -> None:
    """Raise `PassError` where no lanes share their weights."""
    if draft.shards == 1:
        raise PassError(f"{p.name}: no lanes share their weights; say how many, such as mesh{{shards=2}}")


def _count(draft: Draft, stage: str) -> int:
    return len(draft.stage_of(stage).spec.params)


def _peak_bytes(program: Program, early: Early) -> int:
    """Of device memory, where gradients leave behind their last backward."""
    trial = program.copy()
    trial.returns({name: nodes for name, nodes in trial.results().items() if name != "grads"})
    gather_weights(trial, early)
    return profile_memory(trial).peak_bytes[ops.DEVICE]


def gather_weights(program: Program, early: Early) -> None:
    """Replace the resident weights of these stages by a fetch of the shard and a gather at every phase."""
    order, graph = phases(program), program.graph
    residents = {str(n.args[0]).partition(".")[0]: n for n in list(program.ops()) if n.target is ops.resident}
    stages = early.keys() & residents.keys()
    for i in fetched_phases(order, stages):
        phase = order[i]
        ahead = i > 0 and phase.kind in early[phase.stage]
        place = order[i - 1].nodes[0] if ahead else phase.nodes[0]
        # The first gather takes over the resident's name, which the graph would not give out a second time.
        name = residents[phase.stage].name + ("_b" if phase.kind == "backward" else "")
        hand_over(order, i, _gather(graph, place, phase.stage, name))
    for stage in stages:
        graph.erase_node(residents[stage])
    infer_all(program)
    place_frees(program)


def _gather(graph: fx.Graph, place: fx.Node, stage: str, name: str) -> fx.Node:
    with graph.inserting_before(place):
        shard = graph.call_function(ops.fetch, (f"{stage}.weights",), {"group": ops.SHARDS})
        gathered = graph.call_function(ops.all_gather, (shard,), {"group": ops.SHARDS})
    shard.name, gathered.name = f"{name}_shard", name
    return gathered
