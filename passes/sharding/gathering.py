"""Programs of a lane in which stages are gathered from the shards of several lanes before they run."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx

from ...ir import ops
from ...ir.program import Program, homes_of, infer_all, place_frees, profile_memory
from ..decisions import Sharding
from ..phases import hand_over, phases
from .gradient_sums import sum_gradients


def gather_weights(program: Program, sharding: Sharding) -> None:
    """Replace the resident weights of all stages by shards, which are gathered for every phase, or once for all of a
    stage's phases where it is held. Weights leave between a stage's forward and its backward, and between the halves of
    its backward, even where its saved tensors stay: weights among these are found again in those gathered next."""
    order, graph = phases(program), program.graph
    residents = {str(n.args[0]).partition(".")[0]: n for n in list(program.ops()) if n.target is ops.resident}
    last = {phase.stage: i for i, phase in enumerate(order)}
    shards: dict[str, fx.Node] = {}
    with graph.inserting_after(program.batch):
        for stage, node in reversed(list(residents.items()) if sharding.tier == ops.DEVICE else ()):
            names = [f"{node.name}_shard"]
            (shards[stage],) = program.emit(ops.resident, f"{stage}.weights", group=ops.SHARDS, names=names)
    seen: set[str] = set()
    again: Counter[tuple[str, str]] = Counter()
    for i, phase in enumerate(order):
        if phase.stage not in residents or (phase.stage in seen and phase.stage in sharding.held):
            continue
        seen.add(phase.stage)
        phase.last = last[phase.stage] if phase.stage in sharding.held else i
        place = order[max(0, i - sharding.ahead)].nodes[0]
        # The first gather takes over the resident's name, which the graph would not give out a second time.
        again[phase.stage, phase.kind] += 1
        number = again[phase.stage, phase.kind]
        name = residents[phase.stage].name + ("_b" if phase.kind == "backward" else "")
        name += f"_{number}" if number > 1 else ""
        hand_over(order, i, _gather(program, place, phase.stage, name, sharding, shards.get(phase.stage)))
    for node in residents.values():
        graph.erase_node(node)
    infer_all(program)  # gradients are laid out as gathered weights are
    place_frees(program)


def _gather(
    program: Program, place: fx.Node, stage: str, name: str, sharding: Sharding, shard: fx.Node | None
) -> fx.Node:
    how: dict[str, Any] = {"hierarchical": True} if sharding.hierarchical else {}
    with program.graph.inserting_before(place):
        if shard is None:
            (shard,) = program.emit(ops.fetch, f"{stage}.weights", group=ops.SHARDS, names=[f"{name}_shard"])
        (gathered,) = program.emit(ops.all_gather, shard, group=ops.SHARDS, **how)
    gathered.name = name
    return gathered


def peak_bytes(trial: Program, every: str) -> int:
    """Peak of device memory of a program on shards once its gradients are summed as `every` says and used: at the end
    where shards are on the device, otherwise as soon as they can be offloaded. Rewrites the program."""
    sum_gradients(trial, every)
    results = trial.results()
    grads = results.pop("grads", [])
    trial.returns(results)
    homes = homes_of(trial)
    with trial.graph.inserting_before(trial.graph.output_node()):
        for value in grads:
            stage = str(value.meta["type"].stage)
            if homes[stage].weights == ops.DEVICE:
                trial.emit(ops.step, stage, value)
    place_frees(trial)
    return profile_memory(trial).peak_bytes[ops.DEVICE]
