"""Stages of an asynchronous pipeline that are not wholly on their device: their weights come from DRAM or SSD, or are
shared with other lanes, and come again after each update.

In: a lane's program on resident weights, whose updates are in their places. Out: the same program in which each
phase, a run of turns of one stage with no update of it in between, begins with a fetch or a gather and ends with
weights leaving; in which gradients are summed over lanes, and move to where their stage is updated; and in which states
on SSD are read and written back around each update. An `early` fetch is issued at the beginning of the phase before its
own (Mobius 3.2), but never before the update that it must bring.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.program import Program, infer_all, place_frees
from ..decisions import StageTiers
from ..sharding.gradient_sums import short, sum_once

TIERS = ("device", "dram", "states", "all")  # the fastest first; then what needs less room


@dataclass
class Between:
    """Turns of one stage between two of its updates. `after`: the update before; None before any."""

    stage: str
    nodes: list[fx.Node]
    after: fx.Node | None


def phases_of(program: Program) -> list[Between]:
    """The phases of a program, in order. A phase also ends where another stage's begins."""
    found: list[Between] = []
    updated: dict[str, fx.Node] = {}
    for node in program.ops():
        if op_of(node).parts:
            stage = str(node.args[0])
            if not found or found[-1].stage != stage or found[-1].after is not updated.get(stage):
                found.append(Between(stage, [], updated.get(stage)))
            found[-1].nodes.append(node)
        elif node.target is ops.step:
            updated[str(node.args[0])] = node
    return found


def bring_weights(program: Program, early: Mapping[str, bool], on_ssd: StageTiers, is_shared: bool) -> None:
    """Replace the resident weights of the stages in `early`, for each phase, by fetches, or by gathers of resident
    shards where the stages are shared. Weights with the tier "all" are read from SSD into DRAM first."""
    residents = {str(n.args[0]).partition(".")[0]: n for n in list(program.ops()) if n.target is ops.resident}
    moving = [stage for stage in residents if stage in early]
    shards: dict[str, fx.Node] = {}
    for stage in reversed(moving if is_shared else ()):
        with program.graph.inserting_after(program.batch):
            names = [f"{residents[stage].name}_shard"]
            (shards[stage],) = program.emit(ops.resident, f"{stage}.weights", group=ops.SHARDS, names=names)
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    phases, counts = phases_of(program), dict.fromkeys(moving, 0)
    for i, phase in enumerate(phases):
        if phase.stage not in moving:
            continue
        place = phases[i - 1].nodes[0] if early[phase.stage] and i > 0 else phase.nodes[0]
        if phase.after is not None and position[phase.after] >= position[place]:
            place = phase.after.next
        counts[phase.stage] += 1
        names = [f"{residents[phase.stage].name}_{counts[phase.stage]}"]
        with program.graph.inserting_before(place):
            source: str | fx.Node = f"{phase.stage}.weights"
            if on_ssd.get(phase.stage) == "all":
                (source,) = program.emit(ops.read, source, names=[f"{names[0]}_dram"])
            if is_shared:
                (weights,) = program.emit(ops.all_gather, shards[phase.stage], names=names, group=ops.SHARDS)
            else:
                (weights,) = program.emit(ops.fetch, source, names=names)
        for node in phase.nodes:
            node.args = (node.args[0], weights, *node.args[2:])
    for stage in moving:
        program.graph.erase_node(residents[stage])


def move_gradients(program: Program, complete: Sequence[fx.Node], swapped: Collection[str]) -> None:
    """Sum the gradients of each mini-batch over lanes, and offload those of swapped stages."""
    infer_all(program)  # gradients are laid out as gathered weights are
    for grads in complete:
        stage, users = str(grads.meta["type"].stage), list(grads.users)
        found = sum_once(program, grads)
        if stage in swapped:
            with program.graph.inserting_before(found.next):
                (found,) = program.emit(ops.offload, found, names=[f"{short('g', stage)}_dram"])
        if found is not grads:
            for user in users:
                user.replace_input_with(grads, found)
            infer_all(program)


def move_states(program: Program, on_ssd: StageTiers) -> None:
    """Read the states of these stages from SSD before each update, and write them back after it."""
    for node in [n for n in program.ops() if n.target is ops.step and n.args[0] in on_ssd]:
        stage = str(node.args[0])
        what = f"{stage}.{'all' if on_ssd[stage] == 'all' else 'states'}"
        with program.graph.inserting_before(node):
            (states,) = program.emit(ops.read, what, names=[short("states", stage)])
            (updated,) = program.emit(
                ops.step, *node.args, **node.kwargs, states=states, names=[f"{short('states', stage)}_new"]
            )
            program.emit(ops.write, updated, to=what)
        program.graph.erase_node(node)


def place(
    program: Program, complete: Sequence[fx.Node], early: Mapping[str, bool], on_ssd: StageTiers, is_shared: bool
) -> None:
    """Rewrite one program. `complete`: its gradients of whole mini-batches; `early`: see `bring_weights`."""
    bring_weights(program, early, on_ssd, is_shared)
    move_gradients(program, complete, () if is_shared else early.keys())
    move_states(program, on_ssd)
    infer_all(program)
    place_frees(program)
