"""`insert-fetch`: stages that do not fit together come from DRAM, each under the computation of the one before it.

In: programs whose weights are resident. Out: the same programs in which the decided stages are fetched before their
forward and again before their backward, and freed after their last micro-batch (Mobius 3.1, 3.2). The last stage of
each device stays for its backward. A fetch is issued at the start of the phase before its own if both stages fit beside
the activations; where they do not, as many parameters as fit are fetched then (eq. 5: P_j <= G - S_{j-N}), and the rest
at the start of its own phase, into the memory that the stage before it has left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...ir import ops
from ...ir.errors import PassError
from ...ir.program import FirstFit, MemoryProfile, Program, StageSpec, infer_all, place_frees, profile_memory
from ..alike import look, once
from ..base import Pass
from ..draft import Draft
from ..phases import Phase, fetched_phases, hand_over, phases

Early = dict[str, dict[str, int]]  # swapped stage -> kind of phase -> number of parameters fetched one phase before


@dataclass(frozen=True)
class InsertFetch(Pass):
    """`prefetch`: whether to look one phase ahead. `swap`: fetch also the stages of a device that could hold them all;
    their optimizer states then lie in DRAM."""

    name: ClassVar[str] = "insert-fetch"
    needs: ClassVar[tuple[str, ...]] = ("programs", "remat")
    gives: ClassVar[tuple[str, ...]] = ("tiers",)
    decides: ClassVar[str] = "fetch"
    prefetch: bool = True
    swap: bool = False

    def plan(self, draft: Draft) -> Early:
        """Per swapped stage its phases ("forward", "backward") with early fetches, and the parameters these bring."""
        decision: Early = {}
        known: dict[Hashable, list[dict[str, int]]] = {}
        for program in draft.programs:
            budget = draft.lane_hardware.devices[program.device].budget_bytes
            specs = [s.spec for s in draft.stages_on(program.device)]
            found = once(known, (look(program, specs), budget), lambda: self.on_one(program, specs, budget))  # noqa: B023
            decision.update({spec.name: kinds for spec, kinds in zip(specs, found)})
        names = [stage.spec.name for stage in draft.stages]
        return {name: decision[name] for name in names if name in decision}

    def on_one(self, program: Program, specs: Sequence[StageSpec], budget_bytes: int) -> list[dict[str, int]]:
        """Early fetches of each of a device's stages; none where all of them stay."""
        if not self.swap and resident_bytes(program) <= budget_bytes:
            return []
        names = [spec.name for spec in specs]
        early = look_ahead(program, names, budget_bytes) if self.prefetch else {}
        return [early.get(name, {}) for name in names]

    def rewrite(self, draft: Draft, decision: Early) -> None:
        known = {stage.spec.name: stage.spec for stage in draft.stages}
        for stage, kinds in decision.items():
            if stage not in known:
                raise PassError(f"fetch names {stage!r}; the stages are {', '.join(known)}")
            if set(kinds) - {"forward", "backward"}:
                raise PassError(f"fetch of {stage} names the phases {list(kinds)}; there are forward and backward")
            most = len(known[stage].params)
            wrong = [count for count in kinds.values() if not 0 < count <= most]
            if wrong:
                raise PassError(f"fetch of {stage} begins with {wrong[0]} parameters; it has 1 to {most}")
        for program in draft.programs:
            mine = {s.spec.name for s in draft.stages_on(program.device)}
            fetch_weights(program, {stage: early for stage, early in decision.items() if stage in mine})


def resident_bytes(program: Program) -> int:
    """Peak of device memory if everything stays: weights, gradients, and the optimizer's states beside them."""
    interface = program.interface
    stages = {str(n.args[0]).partition(".")[0] for n in program.ops() if n.target is ops.resident}
    states = sum(interface.optimizer_bytes(interface.stages[stage]) for stage in stages)
    return profile_memory(program).peak_bytes[ops.DEVICE] + states


def look_ahead(
    program: Program,
    stages: Collection[str],
    budget_bytes: int,
    reserved_bytes: int = 0,
    most_arena_bytes: int | None = None,
) -> Early:
    """As many early fetches of these stages as the device's memory holds, the smallest neighbours first; then parts.

    `reserved_bytes` of the budget are taken by what the program does not show; `most_arena_bytes`: the size of an arena
    that exists already and must not grow. If the program does not fit even without early fetches, there is none; the
    check of the budgets says what is missing.
    """
    profile = profile_swapped(program, {stage: {} for stage in stages})
    limit_bytes = budget_bytes - reserved_bytes - (profile.peak_bytes[ops.DEVICE] - profile.arena_bytes)
    if most_arena_bytes is not None:
        limit_bytes = min(limit_bytes, most_arena_bytes)
    order = phases(program)
    specs = program.interface.stages
    able = [i for i in fetched_phases(order, stages) if i > 0 and specs[order[i].stage].params]
    able.sort(key=lambda i: (specs[order[i - 1].stage].weight_bytes + specs[order[i].stage].weight_bytes, i))
    counts = {i: len(specs[order[i].stage].params) for i in able}

    def fits(chosen: dict[int, int]) -> bool:
        return arena_bytes(order, specs, stages, chosen) <= limit_bytes

    whole = len(able)
    while whole and not fits({i: counts[i] for i in able[:whole]}):
        whole -= 1
    chosen = {i: counts[i] for i in able[:whole]}
    for i in able[whole:] if fits(chosen) else ():
        low, high = 0, counts[i] - 1  # the most that fits lies between
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits({**chosen, i: middle}) else (low, middle - 1)
        if low:
            chosen[i] = low
    early: Early = {phase.stage: {} for phase in order if phase.stage in stages}
    for i in able:  # several phases of a kind fetch what all of them may
        kinds, kind = early[order[i].stage], order[i].kind
        kinds[kind] = min(chosen.get(i, 0), kinds.get(kind, chosen.get(i, 0)))
    return {stage: {kind: count for kind, count in kinds.items() if count} for stage, kinds in early.items()}


def profile_swapped(program: Program, early: Early) -> MemoryProfile:
    """Memory of a copy with these fetches, whose gradients leave after their last backward."""
    trial = program.copy()
    trial.returns({name: nodes for name, nodes in trial.results().items() if name != "grads"})
    fetch_weights(trial, early)
    return profile_memory(trial)


def arena_bytes(
    order: list[Phase], specs: Mapping[str, StageSpec], stages: Collection[str], early: Mapping[int, int]
) -> int:
    """What `plan_arena` takes for the program with these early fetches (phase to its number of parameters)."""
    begins = set(fetched_phases(order, stages))
    arena = FirstFit(alignment=1)  # for parts of weights, whose bytes are aligned
    leaving: dict[int, list[tuple[int, int]]] = {}  # last phase -> values
    for now in range(len(order)):
        for i, need in _arriving(order, specs, begins, early, now):
            arena.take((now, i), need)
            leaving.setdefault(order[i].last, []).append((now, i))
        for value in leaving.pop(now, ()):
            arena.give(value)
    return arena.size


def _arriving(
    order: list[Phase], specs: Mapping[str, StageSpec], begins: Collection[int], early: Mapping[int, int], now: int
) -> Iterator[tuple[int, int]]:
    """Phases for which something is fetched at the start of phase `now`, and how many bytes."""
    for i in (now, now + 1):
        if i not in begins:
            continue
        spec = specs[order[i].stage]
        part = spec.part_bytes(early.get(i, 0))
        if i == now and part < spec.weight_bytes:
            yield i, spec.weight_bytes - part
        elif i == now + 1 and part:
            yield i, part


def fetch_weights(program: Program, early: Early) -> None:
    """Replace the resident weights of these stages by one fetch per phase, or two where the first brings a part."""
    order = phases(program)
    graph = program.graph
    residents = {str(n.args[0]).partition(".")[0]: n for n in list(program.ops()) if n.target is ops.resident}
    stages = early.keys() & residents.keys()
    again: Counter[tuple[str, str]] = Counter()
    for i in fetched_phases(order, stages):
        phase = order[i]
        spec = program.interface.stages[phase.stage]
        ahead = early[phase.stage].get(phase.kind, 0) if i > 0 else 0
        # The first fetch takes over the resident's name, which the graph would not give out a second time.
        again[phase.stage, phase.kind] += 1
        number = again[phase.stage, phase.kind]
        name = residents[phase.stage].name + ("_b" if phase.kind == "backward" else "")
        name += f"_{number}" if number > 1 else ""
        begun: tuple[fx.Node, ...] = ()
        if 0 < ahead < len(spec.params):
            begun = (_fetch(graph, order[i - 1].nodes[0], spec, f"{name}_part", (), params=ahead),)
        place = order[i - 1].nodes[0] if ahead == len(spec.params) and ahead else phase.nodes[0]
        fetched = _fetch(graph, place, spec, name, begun)
        hand_over(order, i, fetched)
    for stage in stages:
        graph.erase_node(residents[stage])
    infer_all(program)
    place_frees(program)


def _fetch(
    graph: fx.Graph, place: fx.Node, spec: StageSpec, name: str, begun: tuple[fx.Node, ...], **fields: Any
) -> fx.Node:
    with graph.inserting_before(place):
        node = graph.call_function(ops.fetch, (f"{spec.name}.weights", *begun), fields)
    node.name = name
    return node
