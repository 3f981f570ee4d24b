"""Rules about SSDs: states are read and written back once a step, speculative steps have a redo, no read is stale."""

from __future__ import annotations

from torch import fx

from .. import ops
from ..program import Program, norm_device, operands, producer_of
from .case import Case, fail, line_of

STATES = ("states", "all")


def check_states(case: Case) -> None:
    """Optimizer states that are read are taken by one step of their stage, whose result is written back once to the
    same place; a stage whose states are on SSD is stepped on these."""
    for program in case.programs:
        read: dict[str, fx.Node] = {}
        weights: dict[str, fx.Node] = {}
        for node in program.ops():
            if node.target is ops.read and isinstance(node.args[0], str):
                stage, _, what = node.args[0].partition(".")
                if what in STATES:
                    if stage in read and not case.is_asynchronous:
                        fail(program, node, f"the states of {stage} are read in line {line_of(program, read[stage])}")
                    read[stage] = node
                    _check_round(program, node, stage, what)
                else:
                    weights[stage] = node
        for node in program.ops():
            if node.target is ops.step:
                _check_step(program, node, weights)
            elif node.target is ops.write and node.kwargs.get("to") is not None:
                _check_write(program, node)


def _check_round(program: Program, read: fx.Node, stage: str, what: str) -> None:
    steps = [user for user in read.users if user.target is ops.step]
    if len(steps) != 1:
        fail(program, read, f"`{read.name}` is taken by {len(steps)} steps of {stage}; one is needed")
    writes = [user for user in steps[0].users if user.target is ops.write]
    if len(writes) != 1:
        fail(program, steps[0], f"the states of {stage} are written back {len(writes)} times; once is needed")
    others = [user for user in read.users if user is not steps[0]]
    others += [user for user in steps[0].users if user not in writes and user.target is not ops.free]
    if others:
        fail(program, others[0], f"the states of {stage} are for its step, to be written to '{stage}.{what}' after it")


def _check_step(program: Program, node: fx.Node, weights: dict[str, fx.Node]) -> None:
    stage, states = str(node.args[0]), ops.step.bind(node.args, node.kwargs)["states"]
    stays = bool(program.interface.stages[stage].staying)
    if stage in weights and not stays and (states is None or states.meta["type"].kind != "all"):
        message = f"{stage} persists on SSD, so it is stepped on what `read('{stage}.all')` gives and written back"
        fail(program, node, message)


def _check_write(program: Program, node: fx.Node) -> None:
    made = producer_of(operands(node)[0])
    if made.target is not ops.step:
        stage = operands(node)[0].meta["type"].stage
        fail(program, node, f"what is written to {node.kwargs['to']!r} comes from no step of {stage}")


def check_redo(case: Case) -> None:
    """A speculative step has one redo after it, with the same gradients and a norm over all gradients that are stepped;
    no other step has a redo."""
    stepped = {p.device: {str(n.args[0]) for n in p.ops() if n.target is ops.step} for p in case.programs}
    for program in case.programs:
        redone: dict[str, fx.Node] = {}
        early: dict[str, fx.Node] = {}
        for node in program.ops():
            stage = str(node.args[0]) if node.args else ""
            if node.target is ops.step and node.kwargs.get("speculative"):
                early[stage] = node
            elif node.target is ops.redo:
                if stage not in early:
                    fail(program, node, f"no speculative step of {stage} is before this")
                if stage in redone:
                    fail(program, node, f"{stage} is redone already, in line {line_of(program, redone[stage])}")
                if node.args[1] is not early[stage].args[1]:
                    names = [operands(n)[0].name for n in (early[stage], node)]
                    fail(program, node, f"{stage} was stepped on `{names[0]}` and is redone on `{names[1]}`")
                redone[stage] = node
                _check_norm(program, node, stepped)
        for stage, node in early.items():
            if stage not in redone:
                fail(program, node, f"{stage} is stepped before the norm is known, and no redo follows")


def _check_norm(program: Program, redo: fx.Node, stepped: dict[int, set[str]]) -> None:
    """The norm that a redo takes is over the gradients of all stages, on all devices."""
    made = producer_of(operands(redo)[-1])
    reached = {program.device}
    while made.target is ops.all_reduce:
        reached |= set(program.interface.members(str(made.kwargs["group"])))
        made = producer_of(operands(made)[0])
    counted = {value.meta["type"].stage for value in operands(made)}
    interface, device = program.interface, program.device
    elsewhere = {stage for stage in stepped[device] if norm_device(interface, stage, device) in reached - {device}}
    if elsewhere & counted:
        fail(program, made, f"the gradients of {min(elsewhere & counted)} count in the norm of another device already")
    missing = sorted(stepped[device] - counted - elsewhere)
    if missing:
        fail(program, made, f"the norm for a redo lacks the gradients of {', '.join(missing)}")
    others = {device for device, stages in stepped.items() if stages - counted}
    if others - reached:
        names = ", ".join(map(str, sorted(others - reached)))
        fail(program, redo, f"its norm lacks the gradients of device {names}")


def check_written(case: Case) -> None:
    """Activations on SSD are read before they are used, and every written one is read; weights are not read between the
    step that changes them and the write that puts them back."""
    for program in case.programs:
        stepped: dict[str, fx.Node] = {}  # by stage, not written back yet
        for node in program.ops():
            if node.target is ops.write and node.kwargs.get("to") is None:
                _check_activation(program, node)
            elif node.target is ops.write:
                stepped.pop(str(node.kwargs["to"]).partition(".")[0], None)
            elif node.target is ops.step and ops.step.bind(node.args, node.kwargs)["states"] is not None:
                stepped[str(node.args[0])] = node
            elif node.target is ops.read and isinstance(node.args[0], str):
                stage = node.args[0].partition(".")[0]
                if stage in stepped:
                    line = line_of(program, stepped[stage])
                    fail(program, node, f"{stage} was stepped in line {line} and is not written back yet")


def _check_activation(program: Program, node: fx.Node) -> None:
    used = [user for user in node.users if user.target not in (ops.read, ops.free)]
    if used:
        fail(program, node, f"`{node.name}` is on SSD and must be read before `{used[0].name}` uses it")
    if not any(user.target is ops.read for user in node.users):
        fail(program, node, f"`{node.name}` is written to SSD and never read")
