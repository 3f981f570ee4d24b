"""Rules of asynchronous training: each micro-batch updates each stage once, in order, and every computation has the
version of the weights that it must have.

Version v of a stage's weights is what its first v updates have made; the update with micro-batch k turns version k
into k + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from . import ops
from .program import Program, operands, values_of
from .verify_case import Case, fail, line_of


@dataclass
class Reading:
    """Which version of a stage's weights the forward and the backward of one micro-batch read. `predicted`: how many
    updates later than that the forward's weights were made out to be."""

    forward: int
    predicted: int = 0
    backward: int | None = None


def readings(program: Program) -> dict[tuple[str, int], Reading]:
    """Per stage and micro-batch of a program."""
    found: dict[tuple[str, int], Reading] = {}
    for node, version, predicted in _with_versions(program):
        key = str(node.args[0]), _micro_batch(node)
        if node.target is ops.forward:
            found[key] = Reading(version, predicted)
        elif key in found:
            found[key].backward = version
    return found


def _with_versions(program: Program) -> Iterator[tuple[fx.Node, int, int]]:
    """Forwards and backwards, with the version of their weights and the updates that these were carried on by."""
    updates: dict[str, int] = {}
    made: dict[fx.Node, tuple[int, int]] = {}  # stashed or predicted weights
    for node in program.ops():
        stage = str(node.args[0]) if node.args else ""
        if node.target is ops.step:
            updates[stage] = updates.get(stage, 0) + 1
        elif node.target in (ops.stash, ops.predict):
            ahead = node.kwargs.get("updates", 0)
            made[node] = updates.get(stage, 0), ahead if isinstance(ahead, int) else 0
        elif node.target in (ops.forward, ops.backward):
            weights = node.args[1]
            version, ahead = made.get(weights, (updates.get(stage, 0), 0))  # type: ignore[arg-type]
            yield node, version, ahead


def check_versions(case: Case) -> None:
    """What one micro-batch's forward kept, or what its backward must read as well, is not updated in between; weights
    are predicted for the update of the micro-batch that runs on them."""
    if not case.is_asynchronous:
        return
    for program in case.programs:
        _check_resident(program)
        stashing = {str(node.args[0]) for node in program.ops() if node.target is ops.stash}
        predicting = {str(node.args[0]) for node in program.ops() if node.target is ops.predict}
        begun: dict[tuple[str, int], tuple[fx.Node, int]] = {}
        for node, version, ahead in _with_versions(program):
            stage, m = str(node.args[0]), _micro_batch(node)
            if node.target is ops.forward:
                begun[stage, m] = node, version
                if (stage in predicting or ahead) and version + ahead != m:
                    found = version + ahead
                    fail(program, node, f"runs on weights as of version {found}, but micro-batch {m} updates {m}")
                continue
            forward, first = begun[stage, m]
            kept = node.args[2] is not None
            if ahead and not kept:
                fail(program, node, "what is computed again runs on weights that are, not on predicted ones")
            if (kept or stage in stashing) and version != first:
                why = "kept tensors" if kept else f"{stage} stashes its weights"
                message = (
                    f"runs on version {version}, its forward in line {line_of(program, forward)} on {first}; {why}"
                )
                fail(program, node, message)


def check_updates(case: Case) -> None:
    """A stage's gradients of each micro-batch, of a loss that counts fully, reach one update of their own, in order;
    shared parameters' after they were summed over all stages, the same micro-batch on each."""
    if not case.is_asynchronous:
        return
    face = case.programs[0].interface
    for program in case.programs:
        done: dict[str, int] = {}
        made: dict[fx.Node, tuple[int, frozenset[str]]] = {}  # gradients -> their micro-batch, groups they went through
        met: dict[str, int] = {}
        last = program.batch
        for node in program.ops():
            last = node
            if node.target is ops.backward:
                _check_backward(program, node)
                made[values_of(node)[-1]] = _micro_batch(node), frozenset()
            elif node.target is ops.all_reduce:
                group = str(node.kwargs["group"])
                _check_meeting(program, node, {made[value][0] for value in operands(node)}, met.get(group, 0))
                met[group] = met.get(group, 0) + 1
                for value, source in zip(values_of(node), operands(node)):
                    made[value] = made[source][0], made[source][1] | {group}
            elif node.target is ops.step:
                stage = str(node.args[0])
                m, groups = made[operands(node)[0]]
                if m != done.get(stage, 0):
                    fail(program, node, f"update {done.get(stage, 0)} of {stage} has gradients of micro-batch {m}")
                missing = _tied(program, stage) - groups
                if missing:
                    names = ", ".join(sorted(missing))
                    fail(
                        program,
                        node,
                        f"the gradients of {stage} hold a shared parameter and were not summed over {names}",
                    )
                done[stage] = done.get(stage, 0) + 1
        here = dict.fromkeys(str(node.args[0]) for node in program.ops() if node.target is ops.backward)
        for stage in here:
            if face.stages[stage].trained_params and done.get(stage, 0) != face.micro_batches:
                fail(
                    program,
                    last,
                    f"{stage} has {done.get(stage, 0)} updates, there are {face.micro_batches} micro-batches",
                )


def _check_resident(program: Program) -> None:
    names = {str(n.args[0]).partition(".")[0] for n in program.ops() if n.target is ops.resident}
    for node in program.ops():
        if node.target is ops.forward and node.args[0] not in names:
            fail(program, node, f"{node.args[0]} is not resident; asynchronous updates change weights on the device")


def _check_backward(program: Program, node: fx.Node) -> None:
    bound = ops.backward.bind(node.args, node.kwargs)
    if bound["grads"] is not None:
        fail(program, node, "gradients of several micro-batches are added up, but each has an update of its own")
    wrong = [dout for dout in bound["douts"] if isinstance(dout, float) and dout != 1.0]
    if wrong:
        fail(program, node, f"the loss counts {wrong[0]}; that of a micro-batch with an update of its own counts 1.0")


def _check_meeting(program: Program, node: fx.Node, found: set[int], turn: int) -> None:
    if found != {turn}:
        names = ", ".join(map(str, sorted(found)))
        fail(program, node, f"sum {turn} of {node.kwargs['group']!r} has gradients of micro-batch {names}")


def _tied(program: Program, stage: str) -> set[str]:
    rows = program.interface.groups.items()
    return {name for name, members in rows if any(d == program.device and s == stage for d, s, _ in members)}


def _micro_batch(node: fx.Node) -> int:
    number = node.kwargs["micro_batch"]
    assert isinstance(number, int)
    return number
