"""`insert-fetch`: stages that do not fit together come from DRAM, each under the computation of the one before it.

In: programs whose weights are resident. Out: the same programs in which the decided stages are fetched before their
forward and again before their backward, and freed after their last micro-batch (Mobius 3.1, 3.2). The last stage of
each device stays for its backward. A fetch is issued at the start of the phase before its own if both stages fit beside
the activations; where they do not, the parameters that fit are fetched then (eq. 5: P_j <= G - S_{j-N}), and the rest
at the start of its own phase, into the memory that the stage before it has left. Where one phase does not hide a fetch,
fetches are issued the most phases ahead that memory allows (`fetch_queue.py`), if the simulator finds that faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.errors import PassError
from ...ir.program import (
    MemoryProfile,
    Program,
    StageSpec,
    bytes_of_homes,
    donated_operands,
    graph_bytes,
    homes_of,
    infer_all,
    persistent_bytes,
    place_frees,
    places_of,
    producer_of,
    profile_memory,
    values_of,
    work_of,
)
from ...runtime.simulate.costs import CostModel
from ..base import Pass, PlanSoFar
from ..decisions import FETCH, Decision
from ..draft import Draft
from ..equal_programs import look, once
from ..optimizer.insert_optimizer import stepped_where
from ..optimizer.timing import Timing, updates_of
from ..optimizer.updates import write_updates
from ..phases import Phase, fetched_phases, hand_over, phases
from ..receive_earlier import simulated_s
from .fetch_queue import AHEAD, LEAST_GAIN, Fetches, arena_bytes, deepen, estimate_s, least_s, live_bytes, phases_s

# Swapped stage -> "forward" or "backward" -> number of parameters fetched before that phase; and "forward_ahead" or
# "backward_ahead" -> how many phases before, where that is not 1.
Early = dict[str, dict[str, int]]
KINDS = ("forward", "backward")


@dataclass(frozen=True)
class InsertFetch(Pass):
    """`prefetch`: whether to look one phase ahead; `queue`: whether to look further. `swap`: fetch also the stages of a
    device that could hold them all; DRAM then holds their optimizer states. A device whose memory is DRAM holds them
    all the same: there, a fetch would copy within one memory."""

    name: ClassVar[str] = "insert-fetch"
    rank: ClassVar[int] = 62
    needs: ClassVar[tuple[str, ...]] = ("programs", "remat")
    gives: ClassVar[tuple[str, ...]] = ("tiers",)
    decides: ClassVar[tuple[Decision, ...]] = (FETCH,)
    prefetch: bool = True
    swap: bool = False
    queue: bool = True

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        swapped = ["swapped"] if self.swap else []
        return swapped if self.queue else [*swapped, "fetched one phase ahead"]

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        """Without a queue of fetches, if there is one: the passes after it may lose what it gains."""
        own = best.find(cls)
        early = best.decisions.get("fetch", {}).values()
        is_queued = any(kind + AHEAD in kinds for kinds in early for kind in KINDS)
        return [replace(own, queue=False)] if own is not None and is_queued else []

    def plan(self, draft: Draft) -> Early:
        """Per swapped stage its phases ("forward", "backward") with early fetches, and the parameters these bring; and
        how early these are ("forward_ahead", "backward_ahead"), where that is more than one phase."""
        decision: Early = {}
        known: dict[Hashable, list[dict[str, int]]] = {}
        for program in draft.programs:
            device = draft.lane_hardware.devices[program.device]
            budget = device.budget_bytes
            swap = self.swap and not draft.lane_hardware.hosts[device.host].shared_memory
            specs = [s.spec for s in draft.stages_on(program.device)]
            moving = [spec.name for spec in specs if spec.name not in draft.resident]
            key = look(program, specs), budget, swap, tuple(spec.name in moving for spec in specs)
            found = once(known, key, lambda: self.on_one(program, moving, budget, swap))  # noqa: B023
            decision.update(zip(moving, found))
        names = [stage.spec.name for stage in draft.stages]
        one_ahead = {name: decision[name] for name in names if name in decision}
        queued = queue_of(draft, one_ahead) if self.queue and self.prefetch else one_ahead
        if queued == one_ahead:
            return one_ahead
        queued_s = _step_s(draft, queued)
        return queued if math.isfinite(queued_s) and queued_s < _step_s(draft, one_ahead) else one_ahead

    def on_one(self, program: Program, moving: Sequence[str], budget_bytes: int, swap: bool) -> list[dict[str, int]]:
        """Early fetches of each of a device's stages that move; none where all of them stay."""
        if not swap and stays_resident(program, budget_bytes):
            return []
        early = look_ahead(program, moving, budget_bytes) if self.prefetch else {}
        return [early.get(name, {}) for name in moving]

    def rewrite(self, draft: Draft, decision: Early) -> None:
        known = {stage.spec.name: stage.spec for stage in draft.stages}
        for stage, kinds in decision.items():
            if stage not in known:
                raise PassError(f"fetch names {stage!r}; the stages are {', '.join(known)}")
            if stage in draft.resident:
                raise PassError(f"fetch names {stage}, which is resident; leave it out of one of the two")
            if set(kinds) - {*KINDS, *(kind + AHEAD for kind in KINDS)}:
                raise PassError(
                    f"fetch of {stage} names the phases {list(kinds)}; there are forward and backward, and how early "
                    "their fetches are: forward_ahead and backward_ahead"
                )
            most = len(known[stage].moving)
            wrong = [kinds[kind] for kind in KINDS if kind in kinds and not 0 < kinds[kind] <= most]
            if wrong:
                raise PassError(f"fetch of {stage} begins with {wrong[0]} parameters; it has 1 to {most}")
            for kind in KINDS:
                depth = kinds.get(kind + AHEAD, 1)
                if depth < 1 or (kind + AHEAD in kinds and kind not in kinds):
                    raise PassError(
                        f"fetch of {stage} has {kind}_ahead={depth}; it is at least 1, beside {kind}, the number of "
                        "parameters that are fetched so early"
                    )
        for program in draft.programs:
            mine = {s.spec.name for s in draft.stages_on(program.device)}
            fetch_weights(program, {stage: early for stage, early in decision.items() if stage in mine})


def stays_resident(program: Program, budget_bytes: int) -> bool:
    """Whether device memory holds everything at its peak: weights, gradients, and the optimizer's states beside
    them."""
    interface = program.interface
    stages = {str(n.args[0]).partition(".")[0] for n in program.ops() if n.target is ops.resident}
    states = sum(interface.optimizer_bytes(interface.stages[stage]) for stage in stages)
    if persistent_bytes(program).total(ops.DEVICE) + states > budget_bytes:  # no profile of large models
        return False
    return profile_memory(program).peak_bytes[ops.DEVICE] + states <= budget_bytes


def look_ahead(
    program: Program,
    stages: Collection[str],
    budget_bytes: int,
    reserved_bytes: int = 0,
    most_arena_bytes: int | None = None,
) -> Early:
    """The most early fetches of these stages that the device's memory holds, the smallest neighbours first; then parts.

    `reserved_bytes` of the budget are taken by what the program does not show; `most_arena_bytes`: the size of an arena
    that exists already and must not grow. If the program does not fit even without early fetches, there is none; the
    check of the budgets says what is missing.
    """
    limit_bytes = budget_bytes - reserved_bytes - bytes_beside_arena(program, stages)
    if most_arena_bytes is not None:
        limit_bytes = min(limit_bytes, most_arena_bytes)
    order = phases(program)
    specs = program.interface.stages
    able = [i for i in fetched_phases(order, stages) if i > 0 and specs[order[i].stage].moving]
    able.sort(key=lambda i: (specs[order[i - 1].stage].weight_bytes + specs[order[i].stage].weight_bytes, i))
    counts = {i: len(specs[order[i].stage].moving) for i in able}

    live = live_bytes(order, specs, stages, Fetches({}))
    early_bytes = {i: [specs[order[i].stage].part_bytes(count) for count in range(counts[i] + 1)] for i in able}

    def fits(chosen: dict[int, int]) -> bool:
        if any(live[i - 1] + early_bytes[i][count] > limit_bytes for i, count in chosen.items()):
            return False  # whatever gaps there are
        return arena_bytes(order, specs, stages, Fetches(chosen)) <= limit_bytes

    whole = len(able)
    while whole and not fits({i: counts[i] for i in able[:whole]}):
        whole -= 1
    chosen = {i: counts[i] for i in able[:whole]}
    for i in able[whole:] if fits(chosen) else ():
        low, high = 0, counts[i] - 1  # the most that fits is between them
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


def fetches_of(order: Sequence[Phase], early: Early) -> Fetches:
    """A decision, phase by phase; nothing comes before the first."""
    rows = [(i, early.get(phase.stage, {}), phase.kind) for i, phase in enumerate(order) if i > 0]
    return Fetches(
        {i: kinds[kind] for i, kinds, kind in rows if kind in kinds},
        {i: kinds[kind + AHEAD] for i, kinds, kind in rows if kind + AHEAD in kinds},
    )


def queue_of(draft: Draft, one_ahead: Early) -> Early:
    """The same early fetches, further ahead on the devices where one phase does not hide them."""
    found = {stage: dict(kinds) for stage, kinds in one_ahead.items()}
    hardware = draft.lane_hardware
    model = CostModel(hardware, draft.options.precision)
    for program in draft.programs:
        stages = [s.spec.name for s in draft.stages_on(program.device) if s.spec.name in one_ahead]
        if not stages:
            continue
        owner, order, specs = hardware.devices[program.device], phases(program), program.interface.stages
        computing_s = phases_s(program, order, model)
        rate = hardware.bandwidth(f"dram{owner.host}", owner.name)
        early = fetches_of(order, one_ahead)
        before_s = estimate_s(order, specs, stages, early, computing_s, rate)
        if before_s <= (1 + LEAST_GAIN) * least_s(order, specs, stages, computing_s, rate):
            continue
        limit_bytes = owner.budget_bytes - bytes_beside_arena(program, stages)
        deeper = deepen(order, specs, stages, early.counts, limit_bytes)
        if estimate_s(order, specs, stages, deeper, computing_s, rate) >= (1 - LEAST_GAIN) * before_s:
            continue
        for i, depth in deeper.ahead.items():
            if depth > 1:
                found[order[i].stage][order[i].kind + AHEAD] = depth
    return found


def _step_s(draft: Draft, early: Early) -> float:
    """Simulated seconds of the programs with these fetches; infinite where devices would wait for ever. If the programs
    will be given updates, they are simulated with such: gradients that nothing offloads would fill the devices."""
    trial = replace(draft, programs=[program.copy() for program in draft.programs], notes={})
    for program in trial.programs:
        mine = {s.spec.name for s in draft.stages_on(program.device)}
        fetch_weights(program, {stage: kinds for stage, kinds in early.items() if stage in mine})
    if "optimizer" in draft.promised:
        updates = updates_of(trial, stepped_where(trial))
        write_updates(trial.programs, trial.lane_hardware, updates, [Timing(lag=0)] * len(trial.programs))
    found_s = simulated_s(trial, trial.programs)
    return math.inf if found_s is None else found_s


def bytes_beside_arena(program: Program, stages: Collection[str]) -> int:
    """Peak of device memory beside the arena if these stages are fetched, however early, and their gradients leave
    after their last backward: `swap` without writing it. Of resident stages, and of parameters that stay, gradients
    stay too, and states are counted, and what their updates take while they run."""
    interface, specs = program.interface, program.interface.stages
    updated = {str(node.meta["type"].stage): node for node in program.results().get("grads", [])}
    stay = _staying(program, stages, updated)
    leaving = updated.keys() - {spec.name for spec in stay}
    leaves: dict[fx.Node, list[fx.Node]] = {}  # op -> gradients that it reads last
    for node in (updated[stage] for stage in leaving):
        end = max([producer_of(node), *(user for user in node.users if user.op != "output")])
        leaves.setdefault(end, []).append(node)
    homes = {
        stage: replace(home, weights=ops.DRAM) if stage in stages else home for stage, home in homes_of(program).items()
    }
    now = most = bytes_of_homes(interface, homes).total(ops.DEVICE) + graph_bytes(program, fetched=stages)
    live: dict[fx.Node, int] = {}
    for node in program.ops():
        if node.target is ops.free:
            now -= sum(live.pop(value, 0) for value in node.all_input_nodes)
            continue
        now -= sum(live.pop(value, 0) for value in donated_operands(node))
        for value in values_of(node):
            kind = value.meta["type"]
            if kind.owned and kind.memory == ops.DEVICE and not places_of(value):
                in_graph = kind.kind == "kept" and interface.cuda_graphs and not kind.classes and kind.stage in stages
                live[value] = specs[kind.stage].kept_bytes if in_graph else kind.bytes
                now += live[value]
        work = work_of(program, node)
        counts = work.workspace_memory == ops.DEVICE and not op_of(node).workspace_in_arena
        most = max(most, now + counts * work.workspace_bytes)
        now -= sum(live.pop(value, 0) for value in leaves.get(node, ()))
    return most + _bytes_of_updates(program, stay)


def bytes_with_fetches(program: Program, stages: Collection[str], early: Early) -> int:
    """Peak of device memory if these stages are fetched like this: `bytes_beside_arena` and the arena."""
    order, specs = phases(program), program.interface.stages
    arena = arena_bytes(order, specs, stages, fetches_of(order, early))
    return bytes_beside_arena(program, stages) + arena


def _staying(program: Program, stages: Collection[str], updated: Collection[str]) -> list[StageSpec]:
    """Of these stages, which are fetched, and those that are updated: the ones whose gradients stay on the device."""
    specs = program.interface.stages
    return [specs[stage] for stage in dict.fromkeys([*stages, *updated]) if stage not in stages or specs[stage].staying]


def _bytes_of_updates(program: Program, stay: Sequence[StageSpec]) -> int:
    """The optimizer states of stages that stay, and what their updates take while they run."""
    interface = program.interface
    updates = (interface.update_bytes(s, ops.DEVICE, True) + interface.temporary_bytes(s, ops.DEVICE) for s in stay)
    return sum(map(interface.optimizer_bytes, stay)) + max(updates, default=0)


def swap(program: Program, early: Early) -> MemoryProfile:
    """Memory of the program with these fetches, which are written into it, and gradients as in
    `bytes_beside_arena`."""
    results = program.results()
    updated = {str(node.meta["type"].stage): node for node in results.pop("grads", [])}
    stay = _staying(program, early, updated)
    staying = [updated[spec.name] for spec in stay if spec.name in updated]
    program.returns({**results, "grads": staying} if staying else results)
    fetch_weights(program, early)
    profile = profile_memory(program)
    peak_bytes = profile.peak_bytes[ops.DEVICE] + _bytes_of_updates(program, stay)
    return replace(profile, peak_bytes={**profile.peak_bytes, ops.DEVICE: peak_bytes})


def fetch_weights(program: Program, early: Early) -> None:
    """Replace the resident weights of these stages by one fetch per phase, or two where the first brings a part."""
    order = phases(program)
    graph = program.graph
    residents = {str(n.args[0]).partition(".")[0]: n for n in list(program.ops()) if n.target is ops.resident}
    stages = early.keys() & residents.keys()
    again: Counter[tuple[str, str]] = Counter()
    fetches = fetches_of(order, early)
    for i in fetched_phases(order, stages):
        phase = order[i]
        spec = program.interface.stages[phase.stage]
        count = fetches.counts.get(i, 0)
        # The first fetch takes over the resident's name, which the graph would not give out a second time.
        again[phase.stage, phase.kind] += 1
        number = again[phase.stage, phase.kind]
        name = residents[phase.stage].name + ("_b" if phase.kind == "backward" else "")
        name += f"_{number}" if number > 1 else ""
        begun: tuple[fx.Node, ...] = ()
        before = order[fetches.place(i)].nodes[0]
        if 0 < count < len(spec.moving):
            begun = (_fetch(graph, before, spec, f"{name}_part", (), params=count),)
        place = before if count == len(spec.moving) and count else phase.nodes[0]
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
