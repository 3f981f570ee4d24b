"""`insert-fetch`: stages that do not fit together come from DRAM, each under the computation of the one before it.

In: programs whose weights are resident. Out: the same programs in which the decided stages are fetched before their
forward and again before their backward, and freed after their last micro-batch (Mobius 3.1, 3.2). The last stage of
each device stays for its backward. A fetch is issued at the start of the phase before its own if both stages fit
beside the activations (eq. 5: P_j <= G - S_{j-N}), else at the start of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..runtime import ops
from ..runtime.errors import PassError
from ..runtime.memory import profile_memory
from ..runtime.program import Program, infer_all, place_frees
from .base import Draft, Pass


@dataclass(frozen=True)
class InsertFetch(Pass):
    """`prefetch`: whether to look one phase ahead."""

    name: ClassVar[str] = "insert-fetch"
    needs: ClassVar[tuple[str, ...]] = ("programs", "remat")
    gives: ClassVar[tuple[str, ...]] = ("tiers",)
    decides: ClassVar[str] = "fetch"
    prefetch: bool = True

    def plan(self, draft: Draft) -> dict[str, list[str]]:
        """Swapped stage to the phases ("forward", "backward") whose fetch is issued one phase early."""
        decision: dict[str, list[str]] = {}
        for program in draft.programs:
            budget = draft.hardware.devices[program.device].budget_bytes
            if resident_bytes(program) > budget:
                decision.update(self.early_phases(program, budget))
        return decision

    def early_phases(self, program: Program, budget_bytes: int) -> dict[str, list[str]]:
        """Look ahead everywhere, except where two neighbours weigh more than the device holds beside the rest."""
        order = phases(program)
        early = {phase.stage: ["forward", "backward"] if self.prefetch else [] for phase in order}
        while True:
            trial = program.copy()
            fetch_weights(trial, early)
            profile = profile_memory(trial)
            excess = profile.peak_bytes[ops.DEVICE] - budget_bytes
            heavy = _heavy_neighbours(order, early, profile.arena_bytes - excess) if excess > 0 else []
            for phase in heavy:
                early[phase.stage].remove(phase.kind)
            if not heavy:
                return early  # it fits, or the verifier names what is missing

    def rewrite(self, draft: Draft, decision: dict[str, list[str]]) -> None:
        known = [stage.spec.name for stage in draft.stages]
        for stage in decision:
            if stage not in known:
                raise PassError(f"fetch names {stage!r}; the stages are {', '.join(known)}")
        for program in draft.programs:
            mine = {s.spec.name for s in draft.stages_on(program.device)}
            fetch_weights(program, {stage: early for stage, early in decision.items() if stage in mine})


def resident_bytes(program: Program) -> int:
    """Peak of device memory if everything stays: weights, gradients, and the optimizer's states beside them."""
    face = program.interface
    stages = {str(n.args[0]).partition(".")[0] for n in program.ops() if n.target is ops.resident}
    params = sum(face.stages[stage].trained_params for stage in stages)
    states = int(face.state_bytes_per_param * params) + (4 * params if face.master else 0)
    return profile_memory(program).peak_bytes[ops.DEVICE] + states


@dataclass
class Phase:
    """A run of ops that need one stage's weights."""

    stage: str
    kind: str  # "forward" | "backward"
    nodes: list[fx.Node]


def phases(program: Program) -> list[Phase]:
    """In issue order. A backward that follows its own forward directly belongs to the same phase."""
    found: list[Phase] = []
    for node in program.ops():
        if node.target not in (ops.forward, ops.backward, ops.evaluate):
            continue
        stage = str(node.args[0])
        kind = "backward" if node.target is ops.backward else "forward"
        if found and found[-1].stage == stage:
            found[-1].nodes.append(node)
        else:
            found.append(Phase(stage, kind, [node]))
    return found


def fetch_weights(program: Program, early: dict[str, list[str]]) -> None:
    """Replace the resident weights of these stages by one fetch per phase."""
    order = phases(program)
    graph = program.graph
    residents = {str(n.args[0]).partition(".")[0]: n for n in list(program.ops()) if n.target is ops.resident}
    keeps = {  # stages whose saved tensors lie between forward and backward: their weights stay as well
        str(n.args[0]) for n in program.ops() if n.target is ops.backward and n.args[2] is not None
    }
    for i, phase in enumerate(order):
        if phase.stage not in early or phase.stage not in residents:
            continue
        if phase.kind == "backward" and phase.stage in keeps:
            continue
        ahead = phase.kind in early[phase.stage] and i > 0
        place = order[i - 1].nodes[0] if ahead else phase.nodes[0]
        name = f"w{phase.stage.removeprefix('stage')}" + ("_b" if phase.kind == "backward" else "")
        with graph.inserting_before(place):
            fetched = graph.call_function(ops.fetch, (f"{phase.stage}.weights",))
        users = [n for p in order[i:] if p.stage == phase.stage for n in p.nodes]
        for node in users if phase.stage in keeps else phase.nodes:
            node.args = (node.args[0], fetched, *node.args[2:])
        residents[phase.stage].name, fetched.name = fetched.name, name
    for stage in early:
        if stage in residents and not residents[stage].users:
            graph.erase_node(residents[stage])
    infer_all(program)
    place_frees(program)


def _heavy_neighbours(order: list[Phase], early: dict[str, list[str]], room_bytes: int) -> list[Phase]:
    """Early phases whose stage and the one before it do not fit `room_bytes` together, or else the heaviest one."""
    sizes = {
        phase.stage: phase.nodes[0].args[1].meta["type"].bytes  # type: ignore[union-attr]
        for phase in order
    }
    pairs = [
        (sizes[before.stage] + sizes[phase.stage], phase)
        for before, phase in itertools.pairwise(order)
        if phase.kind in early.get(phase.stage, ())
    ]
    heavy = [phase for size, phase in pairs if size > room_bytes]
    return heavy or [phase for _, phase in sorted(pairs, key=lambda pair: -pair[0])[:1]]
