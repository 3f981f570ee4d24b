"""Rules of asynchronous training: each micro-batch updates each stage once, in order, and every computation has the
version of the weights that it must have.

Version v of a stage's own weights is what its first v updates have made; the update with micro-batch k turns version k
into k + 1. Parameters that it shares with other stages have versions of their own, updated as often, but later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from .. import ops
from ..calls import op_of
from ..ops import shared_params
from ..program import Program, micro_batch_of, operands, values_of
from .case import Case, fail, line_of

VersionPair = tuple[int, int]  # of a stage's own parameters, and of those that it shares


@dataclass
class Reading:
    """The versions that the forward and the backward of one micro-batch read. `ahead`: the number of updates by which
    the forward's weights are predicted ahead of its version."""

    forward: VersionPair
    ahead: VersionPair = (0, 0)
    backward: VersionPair | None = None


def readings(program: Program) -> dict[tuple[str, int], Reading]:
    """The versions that each stage of a program reads for each micro-batch."""
    found: dict[tuple[str, int], Reading] = {}
    for node, versions, ahead in _with_versions(program):
        key = str(node.args[0]), micro_batch_of(node)
        if node.target is ops.forward:
            found[key] = Reading(versions, ahead)
        elif key in found:
            found[key].backward = versions
    return found


def _with_versions(program: Program) -> Iterator[tuple[fx.Node, VersionPair, VersionPair]]:
    """Forwards and backwards, with the versions of their weights and the updates by which these are predicted ahead."""
    updates: dict[str, VersionPair] = {}
    made: dict[Any, tuple[VersionPair, VersionPair]] = {}  # stashed or predicted weights
    for node in program.ops():
        stage = str(node.args[0]) if node.args else ""
        own, shared = updates.get(stage, (0, 0))
        if node.target is ops.step:
            part = operands(node)[0].meta["type"].part
            updates[stage] = own + (part != "shared"), shared + (part != "own")
        elif node.target is ops.stash:
            made[node] = (own, shared), (0, 0)
        elif node.target is ops.predict:
            bound = ops.predict.bind(node.args, node.kwargs)
            made[node] = (own, shared), (bound["updates"], bound["shared"])
        elif op_of(node).parts:
            versions, ahead = made.get(node.args[1], ((own, shared), (0, 0)))
            yield node, versions, ahead


def check_versions(case: Case) -> None:
    """Weights are not updated between a micro-batch's forward and backward if forward kept tensors or the stage stashes
    weights. Predicted weights are those of the version that the micro-batch's own update changes."""
    if not case.is_asynchronous:
        return
    for program in case.programs:
        _check_resident(program)
        stashing = {str(node.args[0]) for node in program.ops() if node.target is ops.stash}
        predicting = {str(node.args[0]) for node in program.ops() if node.target is ops.predict}
        begun: dict[tuple[str, int], tuple[fx.Node, VersionPair]] = {}
        for node, versions, ahead in _with_versions(program):
            stage, m = str(node.args[0]), micro_batch_of(node)
            if node.target is ops.forward:
                begun[stage, m] = node, versions
                if stage in predicting:
                    _check_prediction(program, node, versions, ahead)
                continue
            forward, first = begun[stage, m]
            kept = node.args[2] is not None
            if any(ahead) and not kept:
                fail(program, node, "what is computed again runs on weights that are, not on predicted ones")
            if (kept or stage in stashing) and versions != first:
                why = "kept tensors" if kept else f"{stage} stashes its weights"
                found, line = max(versions), line_of(program, forward)
                fail(program, node, f"runs on version {found}, its forward in line {line} on {max(first)}; {why}")


def _check_prediction(program: Program, node: fx.Node, versions: VersionPair, ahead: VersionPair) -> None:
    stage, m = str(node.args[0]), micro_batch_of(node)
    spec, shared = program.interface.stages[stage], shared_params(program.interface, stage)
    has_own = any(p.requires_grad and p.name not in shared for p in spec.params)
    for version, more, there in zip(versions, ahead, (has_own, bool(shared))):
        if there and version + more != m:
            fail(program, node, f"runs on weights as of version {version + more}, but micro-batch {m} updates {m}")


def check_updates(case: Case) -> None:
    """A stage's gradients of each micro-batch, of its whole loss, reach an update of their own, in order; those of
    shared parameters are first summed over all their stages, for the same micro-batch on each."""
    if case.is_asynchronous:
        for program in case.programs:
            _Updates(program).check()


class _Updates:
    """One walk over a program. `made`: gradients -> their micro-batch, and the groups that they went through."""

    def __init__(self, program: Program):
        self.program = program
        self.made: dict[fx.Node, tuple[int, frozenset[str]]] = {}
        self.done: dict[tuple[str, str], int] = {}  # per stage and part
        self.met: dict[str, int] = {}

    def check(self) -> None:
        last = self.program.batch
        for node in self.program.ops():
            last = node
            if node.target is ops.backward:
                self.backward(node)
            elif node.target is ops.split:
                self.made.update(dict.fromkeys(values_of(node), self.made[operands(node)[0]]))
            elif node.target is ops.all_reduce:
                self.all_reduce(node)
            elif node.target is ops.step:
                self.step(node)
        self.check_counts(last)

    def backward(self, node: fx.Node) -> None:
        bound = ops.backward.bind(node.args, node.kwargs)
        if bound["grads"] is not None:
            fail(
                self.program, node, "gradients of several micro-batches are added up, but each has an update of its own"
            )
        wrong = [dout for dout in bound["douts"] if isinstance(dout, float) and dout != 1.0]
        if wrong:
            message = f"the loss counts {wrong[0]}; that of a micro-batch with an update of its own counts 1.0"
            fail(self.program, node, message)
        self.made[values_of(node)[-1]] = micro_batch_of(node), frozenset()

    def all_reduce(self, node: fx.Node) -> None:
        group = str(node.kwargs["group"])
        found, turn = {self.made[value][0] for value in operands(node)}, self.met.get(group, 0)
        if found != {turn}:
            names = ", ".join(map(str, sorted(found)))
            fail(self.program, node, f"sum {turn} of {group!r} has gradients of micro-batch {names}")
        self.met[group] = turn + 1
        for value, source in zip(values_of(node), operands(node)):
            m, groups = self.made[source]
            self.made[value] = m, groups | {group}

    def step(self, node: fx.Node) -> None:
        stage, grads = str(node.args[0]), operands(node)[0]
        part = grads.meta["type"].part
        m, groups = self.made[grads]
        turn = self.done.get((stage, part), 0)
        if m != turn:
            fail(self.program, node, f"update {turn} of {stage} has gradients of micro-batch {m}")
        missing = self.tied(stage) - groups if part != "own" else set()
        if missing:
            message = f"the gradients of {stage} hold a shared parameter and were not summed over "
            fail(self.program, node, message + ", ".join(sorted(missing)))
        self.done[stage, part] = turn + 1

    def tied(self, stage: str) -> set[str]:
        rows, device = self.program.interface.groups.items(), self.program.device
        return {name for name, members in rows if any(d == device and s == stage for d, s, _ in members)}

    def check_counts(self, last: fx.Node) -> None:
        interface = self.program.interface
        for stage in dict.fromkeys(str(n.args[0]) for n in self.program.ops() if n.target is ops.backward):
            parts = ("own", "shared") if any(s == stage and part for s, part in self.done) else ("",)
            for part in parts if interface.stages[stage].trained_params else ():
                count = self.done.get((stage, part), 0)
                if count != interface.micro_batches:
                    message = f"{stage} has {count} updates, there are {interface.micro_batches} micro-batches"
                    fail(self.program, last, message)


def _check_resident(program: Program) -> None:
    names = {str(n.args[0]).partition(".")[0] for n in program.ops() if n.target is ops.resident}
    for node in program.ops():
        if node.target is ops.forward and node.args[0] not in names:
            fail(program, node, f"{node.args[0]} is not resident; asynchronous updates change weights on the device")
