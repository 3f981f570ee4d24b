"""`schedule-async`: every micro-batch is a mini-batch with updates of its own, and nobody waits for them (FTPipe 4).

In: stages on devices. Out: `draft.programs`, complete: no optimizer, rematerialisation or fetch follows. A stage at
distance d from the end does d + 1 forwards, then backward and forward in turn, and is updated right behind each
backward (`async_order`; there also what stages that share parameters do). All but the last stage compute their forward
again in backward, on the weights as they are then; the last one runs both together and keeps what it saved. A step of
the job takes M micro-batches through the pipeline: it fills at the beginning and drains at the end, and a large M
makes that cheap.

A forward of micro-batch k reads weights that lack the updates with the micro-batches still under way. `weights` says
what is done about it: `current` nothing (FTPipe: backward has what is newest); `stash` keeps the version of a
micro-batch's forward for its backward (PipeDream), one copy of the weights for each version under way; `predict`
forwards on what the optimizer is expected to have made of the weights by the time of the update (SpecTrain, XPipe).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from ...ir import ops
from ...ir.errors import PassError
from ...ir.precision import PRECISIONS
from ...ir.program import Program, StageSpec, TensorSpec
from ..base import Pass, require_own
from ..draft import Draft
from ..optimizer.timing import TieGroup, tie_groups
from .async_order import AsyncTurn, AsyncUpdate, Share, Staleness, alternate, distances, recomputed
from .emitter import Emitter, interface_of
from .flow import Flow, Placed, Turn

WEIGHTS = ("current", "stash", "predict")


@dataclass(frozen=True)
class ScheduleAsync(Pass):
    """Raises `PassError` for what asynchronous training cannot do: clipping by the norm of all gradients, fp16,
    copies of the pipeline, and stages before the last that must not be computed again."""

    name: ClassVar[str] = "schedule-async"
    needs: ClassVar[tuple[str, ...]] = ("stages", "devices")
    gives: ClassVar[tuple[str, ...]] = ("programs", "remat", "tiers", "optimizer")
    decides: ClassVar[str] = "schedule"
    fields: ClassVar[tuple[str, ...]] = ("schedule", "rematerialise", "fetch", "optimizer", "staleness")
    synchronous: ClassVar[bool] = False
    final: ClassVar[str] = (
        "asynchronous stages stay on their devices and are updated there behind each backward; for stages that are "
        'swapped, and for choices about saved tensors, use a synchronous strategy, such as "ftpipe" or "mobius"'
    )
    weights: str = "current"

    def plan(self, draft: Draft) -> dict[str, Any]:
        """`staleness`: per stage, and per group of copies of a parameter that stages share, the most updates that occur
        between the weights of a forward and the update with its gradients."""
        if self.weights not in WEIGHTS:
            raise PassError(f"{self.name}: weights={self.weights!r}; there are {', '.join(WEIGHTS)}")
        _check_options(draft)
        flow = Flow(interface_of(draft), draft.devices)
        ties = tie_groups(draft)
        staleness = staleness_of(flow, ties)
        again = recomputed(flow)
        _check_rematerialisable(flow, again)
        trained = [spec.name for spec in flow.specs if spec.trained_params]
        most = flow.interface.micro_batches - 1
        return {
            "schedule": "async",
            "rematerialise": again,
            "fetch": {},
            "optimizer": dict.fromkeys(trained, ops.DEVICE),
            "staleness": {
                **{s.name: min(staleness.distance[s.name], most) for s in flow.specs if staleness.has_own(s)},
                **{group: min(staleness.of_shared, most) for group in ties},
            },
        }

    def rewrite(self, draft: Draft, decision: dict[str, Any]) -> None:
        own = self.plan(draft)
        for name in self.fields:
            require_own(self, name, decision[name], own[name])
        ties = tie_groups(draft)
        flow = Flow(interface_of(draft), draft.devices)
        staleness = staleness_of(flow, ties)
        order = alternate(flow, draft.hardware, draft.options.precision, staleness)
        flow.turns = {d: [s for at, s in order if at == d and isinstance(s, Turn)] for d in flow.turns}
        emitters = [AsyncEmitter(flow, device, order, staleness, ties, self.weights) for device in flow.turns]
        draft.programs = [emitter.step().with_interface(asynchronous=True) for emitter in emitters]


def staleness_of(flow: Flow, ties: dict[str, TieGroup]) -> Staleness:
    shared: dict[str, set[str]] = defaultdict(set)
    for rows in ties.values():
        for _, stage, param in rows:
            shared[stage].add(param)
    return Staleness(distances(flow), shared)


def _check_options(draft: Draft) -> None:
    options = draft.options
    if options.max_grad_norm is not None:
        raise PassError(
            f"max_grad_norm={options.max_grad_norm:g}: an asynchronous stage is updated before the gradients of the "
            "stages in front of it exist, so that there is no norm over all of them, and clipping each stage by its "
            'own norm is another training. Leave max_grad_norm out, or use a synchronous strategy, such as "ftpipe"'
        )
    if PRECISIONS[options.precision].scales_loss:
        raise PassError(
            'precision="fp16": whether a step counts is known when all gradients of a micro-batch are there, but '
            'asynchronous stages are updated before. Use precision="bf16" or "fp32", or a synchronous strategy'
        )
    if draft.lanes and (len(draft.lanes) > 1 or draft.shards > 1):
        raise PassError(
            f"mesh makes {len(draft.lanes)} copies of the pipeline, whose updates would have to wait for each other; "
            "schedule-async runs one, on all devices: leave mesh out, or use a synchronous schedule, such as "
            "schedule-1f1b"
        )


def _check_rematerialisable(flow: Flow, again: Sequence[str]) -> None:
    for name in again:
        if not flow.interface.stages[name].rematerialisable:
            raise PassError(
                f"{name} writes a buffer that its forward reads, so that it cannot be computed again in backward, as "
                "all asynchronous stages but the last are. Use fewer stages, or a synchronous strategy, such as "
                '"1f1b"'
            )


class AsyncEmitter(Emitter):
    """Writes one device's program: turns and updates in their order, each update with one micro-batch's gradients."""

    def __init__(
        self,
        flow: Flow,
        device: int,
        order: Sequence[tuple[int, AsyncTurn]],
        staleness: Staleness,
        ties: dict[str, TieGroup],
        weights: str,
    ):
        turns: list[Placed] = [(at, step) for at, step in order if isinstance(step, Turn)]
        super().__init__(flow, device, turns)
        self.program.with_interface(groups={**self.program.interface.groups, **ties})
        self.own = [step for at, step in order if at == device]
        self.staleness, self.ties, self.mode = staleness, ties, weights
        self.recomputed = frozenset(recomputed(flow))
        self.pending: dict[tuple[str, int, bool], fx.Node] = {}  # gradients of own, and of shared parameters
        self.read: dict[tuple[str, int], fx.Node] = {}  # per forward under way, the weights that it read
        self.updates: dict[tuple[str, bool], int] = defaultdict(int)

    def step(self) -> Program:
        for step in self.own:
            if isinstance(step, AsyncUpdate):
                self.update(step)
                continue
            if isinstance(step, Share):
                self.share(step)
                continue
            spec = self.interface.stages[step.stage]
            if spec.name not in self.weights:
                self.hold(spec)
            (self.backward if step.is_backward else self.forward)(spec, step.micro_batch)
        return self.finish({"loss": self.losses} if self.losses else {})

    def forward(self, spec: StageSpec, m: int) -> None:
        inputs = self.inputs(spec, m)
        weights = self.read[spec.name, m] = self.version(spec, m)
        keep = spec.name in self.flow.trained and spec.name not in self.recomputed
        names = [*(f"{o.name}_m{m}" for o in spec.outputs), f"kept{_number(spec)}_m{m}"]
        fields = {} if keep else {"keep": False}
        made = self.program.emit(ops.forward, spec.name, weights, *inputs, micro_batch=m, names=names, **fields)
        if keep:
            self.kept[spec.name, m] = made.pop()
        self.outputs(spec, made, m)

    def version(self, spec: StageSpec, m: int) -> fx.Node:
        """The weights that the forward of a micro-batch reads."""
        weights = self.weights[spec.name]
        missing = m - self.updates[spec.name, False] if self.staleness.has_own(spec) else 0
        shared = m - self.updates[spec.name, True] if spec.name in self.staleness.shared else 0
        if self.mode != "predict" or not missing + shared:
            return weights
        fields = {"shared": shared} if shared else {}
        names = [f"w{_number(spec)}_for_m{m}"]
        return self.program.emit(ops.predict, spec.name, weights, updates=missing, names=names, **fields)[0]

    def backward(self, spec: StageSpec, m: int) -> None:
        """Each micro-batch's gradients are its own."""
        super().backward(spec, m)
        grads = self.grads.pop(spec.name)
        own, shared = self.staleness.has_own(spec), spec.name in self.staleness.shared
        if own and shared:
            names = [f"g{_number(spec)}_m{m}_{part}" for part in ("own", "shared")]
            parts = self.program.emit(ops.split, spec.name, grads, names=names)
            self.pending[spec.name, m, False], self.pending[spec.name, m, True] = parts
        elif spec.trained_params:
            self.pending[spec.name, m, shared] = grads
        self.read.pop((spec.name, m))

    def weights_of_backward(self, spec: StageSpec, m: int) -> fx.Node:
        """The newest; or what the forward read, where that is stashed, or in the last stage, which kept tensors."""
        found = self.read[spec.name, m]
        return found if self.mode == "stash" or (spec.name, m) in self.kept else self.weights[spec.name]

    def gradient(self, spec: StageSpec, out: TensorSpec, m: int) -> fx.Node | float | None:
        """Of the loss 1: each micro-batch has updates of its own."""
        return 1.0 if out.requires_grad and out.name == spec.loss else super().gradient(spec, out, m)

    def update(self, update: AsyncUpdate) -> None:
        self.stash(self.interface.stages[update.stage])
        grads = self.pending.pop((update.stage, update.micro_batch, update.is_shared))
        self.program.emit(ops.step, update.stage, grads)
        self.updates[update.stage, update.is_shared] += 1

    def stash(self, spec: StageSpec) -> None:
        """Before an update, what forwards under way have read of the resident weights is copied for their backward."""
        weights = self.weights[spec.name]
        under_way = [key for key, node in self.read.items() if key[0] == spec.name and node is weights]
        if self.mode != "stash" or not under_way:
            return
        names = [f"w{_number(spec)}_v{max(self.updates[spec.name, shared] for shared in (False, True))}"]
        (kept,) = self.program.emit(ops.stash, spec.name, weights, names=names)
        self.read.update(dict.fromkeys(under_way, kept))

    def share(self, share: Share) -> None:
        """The parts of a shared parameter's gradient, over all stages that share it."""
        m = share.micro_batch
        for group, rows in self.ties.items():
            mine = [stage for device, stage, _ in rows if device == self.device]
            if mine:
                names = [f"g{stage.removeprefix('stage')}_m{m}_summed" for stage in mine]
                grads = [self.pending[stage, m, True] for stage in mine]
                summed = self.program.emit(ops.all_reduce, *grads, names=names, group=group)
                self.pending.update(((stage, m, True), node) for stage, node in zip(mine, summed))


def _number(spec: StageSpec) -> str:
    return spec.name.removeprefix("stage")
