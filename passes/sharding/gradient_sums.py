"""Adds a stage's gradients up over lanes: once a step, or micro-batch by micro-batch (MiCS 3.4).

In: programs whose results hold every stage's gradients, summed over the lane's own micro-batches. Out: programs whose
results hold the sums over all lanes; for stages that lanes share, each device's part of them.
"""

from __future__ import annotations

import operator

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.program import Program, copies_group, place_frees, producer_of

STEP, TWO_HOP, MICRO_BATCH, ALL_REDUCE = "step", "two-hop", "micro-batch", "all-reduce"
WAYS = (STEP, TWO_HOP, MICRO_BATCH, ALL_REDUCE)


def sum_gradients(program: Program, every: str, hierarchical: bool = False) -> None:
    """Rewrite a program. `every`: one of `WAYS`, see `insert_two_hop.py`. `hierarchical`: scatters add up inside hosts
    first."""
    how = {"hierarchical": True} if hierarchical else {}
    how |= {"whole": True} if every == ALL_REDUCE else {}
    results = program.results()
    grads = results.get("grads", [])
    results["grads"] = [
        _sum_each(program, g, every, **how) if every in (TWO_HOP, MICRO_BATCH) else sum_once(program, g, **how)
        for g in grads
    ]
    program.returns(results)
    place_frees(program)


def sum_once(program: Program, total: fx.Node, **how: bool) -> fx.Node:
    """After the last backward, add the sum up over the devices that run the stage in turn, and over a team whose
    members have different tokens and parts of parameters; scatter it over the group's lanes, and add it up over the
    replicas."""
    stage, interface = str(total.meta["type"].stage), program.interface
    name, copies = short("g", stage), copies_group(stage)
    takes_turns = copies in interface.groups
    with program.graph.inserting_before(_op_after_sends(total) if takes_turns else total.next):
        if takes_turns:
            (total,) = program.emit(ops.all_reduce, total, names=[f"{name}_copies"], group=copies)
        total = _sum_in_team(program, total, f"{name}_team")
        if interface.shards > 1:
            (total,) = program.emit(ops.reduce_scatter, total, names=[f"{name}_shard"], group=ops.SHARDS, **how)
        if interface.replicas > 1:
            (total,) = program.emit(ops.all_reduce, total, names=[f"{name}_all"], group=ops.REPLICAS)
    return total


def _sum_in_team(program: Program, grads: fx.Node, name: str) -> fx.Node:
    """Gradients summed over a team whose members have different tokens, but for those of its members' own parts."""
    interface = program.interface
    if not interface.sums_in_team or not interface.stages[str(grads.meta["type"].stage)].common_grad_bytes:
        return grads
    return program.emit(ops.all_reduce, grads, names=[name], group=ops.TEAM, parts=False)[0]


def _op_after_sends(total: fx.Node) -> fx.Node:
    """The op before which devices that take turns meet: another one may still need what the last backward sends."""
    found = total.next
    while found.target in (ops.send, ops.free, operator.getitem):
        found = found.next
    return found


def _sum_each(program: Program, total: fx.Node, every: str, **how: bool) -> fx.Node:
    """Scatter the gradients of every backward and add them to those of the micro-batches before; add them up over the
    replicas after the last backward (`TWO_HOP`), or each time."""
    interface, graph = program.interface, program.graph
    name = short("g", str(total.meta["type"].stage))
    found: fx.Node | None = None
    own = _gradients_of_sum(program, total)
    for number, grads in enumerate(own):
        with graph.inserting_before(grads.next):
            grads = _sum_in_team(program, grads, f"{name}_team_m{number}")
            if every == TWO_HOP:
                before = () if found is None else (found,)
                names = [f"{name}_shard_m{number}"]
                (found,) = program.emit(ops.reduce_scatter, grads, *before, names=names, group=ops.SHARDS, **how)
                continue
            (part,) = program.emit(
                ops.reduce_scatter, grads, names=[f"{name}_shard_m{number}"], group=ops.SHARDS, **how
            )
            if interface.replicas > 1:
                names = [f"{name}_all_m{number}"]
                (part,) = program.emit(ops.all_reduce, part, names=names, group=ops.REPLICAS)
            if found is not None:
                (part,) = program.emit(ops.add, found, part, names=[f"{name}_sum_m{number}"])
            found = part
    assert found is not None
    if every == TWO_HOP and interface.replicas > 1:
        with graph.inserting_before(found.next):
            (found,) = program.emit(ops.all_reduce, found, names=[f"{name}_all"], group=ops.REPLICAS)
    return found


def _gradients_of_sum(program: Program, total: fx.Node) -> list[fx.Node]:
    """Split a sum into the gradients of each backward, in order, no longer added to those before."""
    found: list[fx.Node] = []
    value: fx.Node | None = total
    while value is not None:
        found.append(value)
        producer = producer_of(value)
        op = op_of(producer)
        before = op.bind(producer.args, producer.kwargs)["grads"]
        if before is not None:
            place = list(op.signature.parameters).index("grads")
            producer.args = producer.args[:place]
            producer.kwargs = {name: given for name, given in producer.kwargs.items() if name != "grads"}
        value = before
    return found[::-1]


def short(prefix: str, stage: str) -> str:
    return f"{prefix}{stage.removeprefix('stage')}"
