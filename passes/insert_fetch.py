"""`insert-fetch`: stages that do not fit together come from DRAM, each under the computation of the one before it.

In: programs whose weights are resident. Out: the same programs in which the decided stages are fetched before their
forward and again before their backward, and freed after their last micro-batch (Mobius 3.1, 3.2). The last stage of
each device stays for its backward. A fetch is issued at the start of the phase before its own if both stages fit
beside the activations (eq. 5: P_j <= G - S_{j-N}), else at the start of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..runtime import ops
from ..runtime.errors import PassError
from ..runtime.memory import MemoryProfile, profile_memory
from ..runtime.program import Program, StageSpec, aligned, infer_all, place_frees
from .base import Draft, Pass

Early = dict[str, list[str]]  # swapped stage -> its phases whose fetch is issued one phase before


@dataclass(frozen=True)
class InsertFetch(Pass):
    """`prefetch`: whether to look one phase ahead."""

    name: ClassVar[str] = "insert-fetch"
    needs: ClassVar[tuple[str, ...]] = ("programs", "remat")
    gives: ClassVar[tuple[str, ...]] = ("tiers",)
    decides: ClassVar[str] = "fetch"
    prefetch: bool = True

    def plan(self, draft: Draft) -> Early:
        """Swapped stage to the phases ("forward", "backward") whose fetch is issued one phase early."""
        decision: dict[str, Sequence[str]] = {}
        for program in draft.programs:
            budget = draft.hardware.devices[program.device].budget_bytes
            if resident_bytes(program) > budget:
                stages = [phase.stage for phase in phases(program)]
                decision.update(dict.fromkeys(stages, ()))
                if self.prefetch:
                    decision.update(look_ahead(program, stages, budget))
        names = [stage.spec.name for stage in draft.stages]
        return {name: list(decision[name]) for name in names if name in decision}

    def rewrite(self, draft: Draft, decision: Early) -> None:
        known = [stage.spec.name for stage in draft.stages]
        for stage, kinds in decision.items():
            if stage not in known:
                raise PassError(f"fetch names {stage!r}; the stages are {', '.join(known)}")
            if set(kinds) - {"forward", "backward"}:
                raise PassError(f"fetch of {stage} names the phases {kinds}; there are forward and backward")
        for program in draft.programs:
            mine = {s.spec.name for s in draft.stages_on(program.device)}
            fetch_weights(program, {stage: early for stage, early in decision.items() if stage in mine})


def resident_bytes(program: Program) -> int:
    """Peak of device memory if everything stays: weights, gradients, and the optimizer's states beside them."""
    face = program.interface
    stages = {str(n.args[0]).partition(".")[0] for n in program.ops() if n.target is ops.resident}
    return profile_memory(program).peak_bytes[ops.DEVICE] + sum(
        state_bytes(program, face.stages[stage]) for stage in stages
    )


def state_bytes(program: Program, spec: StageSpec) -> int:
    """Optimizer states and fp32 masters of a stage."""
    face = program.interface
    return int(face.state_bytes_per_param * spec.trained_params) + (4 * spec.trained_params if face.master else 0)


@dataclass
class Phase:
    """A run of ops that need one stage's weights. `last`: index of the phase behind which the weights leave."""

    stage: str
    kind: str  # "forward" | "backward"
    nodes: list[fx.Node]
    last: int = 0


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
    keeps = {  # stages whose saved tensors lie between forward and backward: their weights stay as well
        str(n.args[0]) for n in program.ops() if n.target is ops.backward and n.args[2] is not None
    }
    for i, phase in enumerate(found):
        phase.last = max(j for j, p in enumerate(found) if p.stage == phase.stage) if phase.stage in keeps else i
    return found


def fetched_phases(order: list[Phase], stages: Collection[str]) -> list[int]:
    """Indices of the phases that begin with a fetch: those whose weights are not there from an earlier one."""
    held: dict[str, int] = {}
    found = []
    for i, phase in enumerate(order):
        if phase.stage in stages and held.get(phase.stage, -1) < i:
            found.append(i)
            held[phase.stage] = phase.last
    return found


def look_ahead(program: Program, stages: Collection[str], budget_bytes: int, reserved_bytes: int = 0) -> Early:
    """As many early fetches of these stages as the device's memory holds, the smallest neighbours first.

    `reserved_bytes` of the budget are taken by what the program does not show. If even no early fetch fits, there is
    none; whoever checks the budgets says what is missing.
    """
    profile = profile_swapped(program, {stage: [] for stage in stages})
    limit_bytes = budget_bytes - reserved_bytes - (profile.peak_bytes[ops.DEVICE] - profile.arena_bytes)
    order = phases(program)
    sizes = {phase.stage: aligned(program.interface.stages[phase.stage].weight_bytes) for phase in order}
    able = [i for i in fetched_phases(order, stages) if i > 0]
    able.sort(key=lambda i: (sizes[order[i - 1].stage] + sizes[order[i].stage], i))
    count = len(able)
    while count and arena_bytes(order, sizes, stages, set(able[:count])) > limit_bytes:
        count -= 1
    early: Early = {stage: [] for stage in sizes if stage in stages}
    for i in sorted(able[:count]):
        early[order[i].stage].append(order[i].kind)
    return early


def profile_swapped(program: Program, early: Early) -> MemoryProfile:
    """Memory of a copy with these fetches, whose gradients leave behind their last backward."""
    trial = program.copy()
    trial.returns({name: nodes for name, nodes in trial.results().items() if name != "grads"})
    fetch_weights(trial, early)
    return profile_memory(trial)


def arena_bytes(order: list[Phase], sizes: dict[str, int], stages: Collection[str], early: set[int]) -> int:
    """What `plan_arena` takes for the program with these early fetches: first fit, in issue order."""
    begins = fetched_phases(order, stages)
    live: list[tuple[int, int, int]] = []  # (offset, end, last phase)
    size = 0
    for now in range(len(order)):
        arriving = [i for i in begins if (i - 1 if i in early else i) == now]
        for i in arriving:
            offset, need = 0, sizes[order[i].stage]
            for start, end, _ in sorted(live):
                if offset + need <= start:
                    break
                offset = max(offset, end)
            live.append((offset, offset + need, order[i].last))
            size = max(size, offset + need)
        live = [row for row in live if row[2] > now]
    return size


def fetch_weights(program: Program, early: Early) -> None:
    """Replace the resident weights of these stages by one fetch per phase."""
    order = phases(program)
    graph = program.graph
    residents = {str(n.args[0]).partition(".")[0]: n for n in list(program.ops()) if n.target is ops.resident}
    stages = early.keys() & residents.keys()
    for i in fetched_phases(order, stages):
        phase = order[i]
        ahead = phase.kind in early[phase.stage] and i > 0
        with graph.inserting_before(order[i - 1].nodes[0] if ahead else phase.nodes[0]):
            fetched = graph.call_function(ops.fetch, (f"{phase.stage}.weights",))
        # The first fetch takes over the resident's name, which the graph would not give out a second time.
        fetched.name = residents[phase.stage].name + ("_b" if phase.kind == "backward" else "")
        for later in order[i : phase.last + 1]:
            for node in later.nodes if later.stage == phase.stage else ():
                node.args = (node.args[0], fetched, *node.args[2:])
    for stage in stages:
        graph.erase_node(residents[stage])
    infer_all(program)
    place_frees(program)
