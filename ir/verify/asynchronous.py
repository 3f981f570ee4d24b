"""Rules of asynchronous training: each mini-batch updates each stage once, in order, and every computation has the
version of the weights that it must have.

Version v of a stage's own weights is what its first v updates have made; the update with mini-batch k turns version k
into k + 1. Parameters that it shares with other stages have versions of their own, updated as often, but later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from .. import ops
from ..calls import op_of
from ..ops import shared_params
from ..program import WORLD, Program, micro_batch_of, operands, values_of
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
        elif op_of(node).parts:  # on the newest weights, or on a version of them
            versions, ahead = made.get(node.args[1], ((own, shared), (0, 0)))
            yield node, versions, ahead


def check_versions(case: Case) -> None:
    """Weights are not updated between a micro-batch's forward and backward if forward kept tensors or the stage stashes
    weights. Predicted weights are those of the version that the micro-batch's own update changes."""
    if not case.is_asynchronous:
        return
    for program in case.programs:
        _check_newest(program)
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
    own = m // program.interface.accumulate
    for version, more, there in zip(versions, ahead, (has_own, bool(shared))):
        if there and version + more != own:
            fail(program, node, f"runs on weights as of version {version + more}, but mini-batch {own} updates {own}")


def check_updates(case: Case) -> None:
    """A stage's gradients of each mini-batch, of its whole loss, reach an update of their own, in order. Those of
    shared parameters are first summed over all their stages, and those of other lanes over these, for the same
    mini-batch on each. What is clipped, or skipped, is so by the norm of all gradients of its mini-batch."""
    if case.is_asynchronous:
        for program in case.programs:
            _Updates(program).check()


@dataclass(frozen=True)
class _Made:
    """Gradients: their stage, their mini-batch, the micro-batches of it that they hold, the groups that they went
    through, and the norm by which they are clipped."""

    stage: str
    mini_batch: int
    micro_batches: frozenset[int]
    groups: frozenset[str] = frozenset()
    norm: fx.Node | None = None


@dataclass(frozen=True)
class _Norm:
    """A norm: of which mini-batch, over which stages of the device, and over which groups."""

    mini_batch: int
    stages: frozenset[str]
    groups: frozenset[str] = frozenset()


class _Updates:
    """One walk over a program. `made`, `norms`: what gradients and norms are."""

    def __init__(self, program: Program):
        self.program, self.interface = program, program.interface
        self.made: dict[fx.Node, _Made] = {}
        self.norms: dict[fx.Node, _Norm] = {}
        self.done: dict[tuple[str, str], int] = {}  # per stage and part
        self.met: dict[tuple[str, str], int] = {}  # per group; of one over lanes also per stage
        steps = [node for node in program.ops() if node.target is ops.step]
        self.stepped = frozenset(str(node.args[0]) for node in steps)
        self.clipped = any(node.target is ops.clip for node in program.ops())

    def check(self) -> None:
        last = self.program.batch
        for node in self.program.ops():
            last = node
            if node.target is ops.backward:
                self.backward(node)
            elif node.target in (ops.split, ops.offload) and operands(node)[0] in self.made:
                self.made.update(dict.fromkeys(values_of(node), self.made[operands(node)[0]]))
            elif node.target is ops.norm:
                self.norm(node)
            elif node.target in (ops.all_reduce, ops.reduce_scatter):
                self.reduce(node)
            elif node.target is ops.clip:
                self.clip(node)
            elif node.target is ops.step:
                self.step(node)
        self.check_counts(last)

    def backward(self, node: fx.Node) -> None:
        bound, stage, m = ops.backward.bind(node.args, node.kwargs), str(node.args[0]), micro_batch_of(node)
        own = _Made(stage, m // self.interface.accumulate, frozenset({m}))
        before = None if bound["grads"] is None else self.made[bound["grads"]]
        if before is not None and before.mini_batch != own.mini_batch:
            found = f"of mini-batch {before.mini_batch} are added to those of {own.mini_batch}"
            fail(self.program, node, f"gradients {found}, but each has an update of its own")
        share = 1.0 / self.interface.micro_batches_of_update
        wrong = [dout for dout in bound["douts"] if isinstance(dout, float) and dout != share]
        if wrong:
            message = f"the loss counts {wrong[0]}; that of a micro-batch among those of its update counts {share}"
            fail(self.program, node, message)
        more = frozenset() if before is None else before.micro_batches
        self.made[values_of(node)[-1]] = replace(own, micro_batches=own.micro_batches | more)

    def reduce(self, node: fx.Node) -> None:
        group, values = str(node.kwargs["group"]), operands(node)
        if values[0] in self.norms:
            for value, source in zip(values_of(node), values):
                self.norms[value] = replace(self.norms[source], groups=self.norms[source].groups | {group})
            return
        found = {self.made[value].mini_batch for value in values}
        key = group, self.made[values[0]].stage if group in ops.MESH_GROUPS else ""
        turn = self.met.get(key, 0)
        if found != {turn}:
            names = ", ".join(map(str, sorted(found)))
            fail(self.program, node, f"sum {turn} of {group!r} has gradients of mini-batch {names}")
        self.met[key] = turn + 1
        for value, source in zip(values_of(node), values):
            before = self.made[source]
            self.made[value] = replace(before, groups=before.groups | {group})

    def norm(self, node: fx.Node) -> None:
        given = [self.made[value] for value in operands(node)]
        numbers = sorted({one.mini_batch for one in given})
        if len(numbers) > 1:
            fail(self.program, node, f"a norm of gradients of mini-batches {', '.join(map(str, numbers))}")
        for one in given:
            self.require_whole(node, one)
        number = numbers[0] if numbers else len(self.norms)
        self.norms[values_of(node)[0]] = _Norm(number, frozenset(one.stage for one in given))

    def clip(self, node: fx.Node) -> None:
        grads, norm = operands(node)
        self.require_norm(node, self.made[grads], norm)
        self.made[values_of(node)[0]] = replace(self.made[grads], norm=norm)

    def require_norm(self, node: fx.Node, grads: _Made, norm: fx.Node) -> None:
        found = self.norms[norm]
        if found.mini_batch != grads.mini_batch:
            what = f"gradients of mini-batch {grads.mini_batch} meet the norm of {found.mini_batch}"
            fail(self.program, node, what)
        lacking = sorted(self.stepped - found.stages)
        if lacking:
            fail(self.program, node, f"its norm lacks the gradients of {', '.join(lacking)}")
        if WORLD in self.interface.groups and WORLD not in found.groups:
            fail(self.program, node, "its norm is of this device only")

    def step(self, node: fx.Node) -> None:
        stage, (grads, *others) = str(node.args[0]), operands(node)
        part, made = grads.meta["type"].part, self.made[grads]
        turn = self.done.get((stage, part), 0)
        if made.mini_batch != turn:
            fail(self.program, node, f"update {turn} of {stage} has gradients of mini-batch {made.mini_batch}")
        self.require_whole(node, made, part)
        norms = [value for value in others if value.meta["type"].kind == "norm"]
        for norm in norms:
            self.require_norm(node, made, norm)
        if self.clipped and made.norm is None:
            fail(self.program, node, f"the gradients of {stage} are not clipped, though others are")
        self.done[stage, part] = turn + 1

    def require_whole(self, node: fx.Node, made: _Made, part: str = "") -> None:
        """Gradients that are used hold all micro-batches of their mini-batch, of all lanes, and of all stages that
        share a parameter."""
        first = made.mini_batch * self.interface.accumulate
        lacking = sorted(set(range(first, first + self.interface.accumulate)) - made.micro_batches)
        if lacking:
            fail(self.program, node, f"the gradients of {made.stage} lack micro-batch {', '.join(map(str, lacking))}")
        missing = self.tied_groups(made.stage) - made.groups if part != "own" else set()
        if missing:
            message = f"the gradients of {made.stage} hold a shared parameter and were not summed over "
            fail(self.program, node, message + ", ".join(sorted(missing)))
        for group in ops.MESH_GROUPS if self.interface.lanes else ():
            if self.interface.size(group) > 1 and group not in made.groups:
                fail(self.program, node, f"the gradients of {made.stage} were not summed over the {group} of lanes")

    def tied_groups(self, stage: str) -> set[str]:
        rows, device = self.interface.groups.items(), self.program.device
        return {name for name, members in rows if any(d == device and s == stage for d, s, _ in members)}

    def check_counts(self, last: fx.Node) -> None:
        interface = self.interface
        for stage in dict.fromkeys(str(n.args[0]) for n in self.program.ops() if n.target is ops.backward):
            parts = ("own", "shared") if any(s == stage and part for s, part in self.done) else ("",)
            for part in parts if interface.stages[stage].trained_params else ():
                count = self.done.get((stage, part), 0)
                if count != interface.mini_batches:
                    message = f"{stage} has {count} updates, there are {interface.mini_batches} mini-batches"
                    fail(self.program, last, message)


def _check_newest(program: Program) -> None:
    """Weights that come to the device for some turns are those of the last update before these."""
    updates: dict[str, int] = {}
    brought: dict[fx.Node, int] = {}
    for node in program.ops():
        stage = str(node.args[0]).partition(".")[0] if node.args else ""
        if node.target is ops.step:
            updates[stage] = updates.get(stage, 0) + 1
        elif node.target in (ops.fetch, ops.read) and isinstance(node.args[0], str):
            brought[node] = updates.get(stage, 0)
        elif node.target in (ops.fetch, ops.all_gather):
            source = operands(node)[0]
            brought[node] = brought.get(source, updates.get(str(node.meta["type"].stage), 0))
        elif op_of(node).parts and node.args[1] in brought:
            weights, found = operands(node)[0], updates.get(stage, 0)
            if brought[weights] != found:
                line, made = line_of(program, weights), brought[weights]
                fail(program, node, f"{stage} has had {found} updates, but line {line} brings what {made} made")
