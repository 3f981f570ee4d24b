"""`schedule-async`: every micro-batch is a mini-batch with its own updates, for which no stage waits (FTPipe 4).

In: stages on devices. Out: `draft.programs`, complete: no optimizer, rematerialisation or fetch follows. A stage at
distance d from the end does d + 1 forwards, then backward and forward in turn, and is updated right after each backward
(`async_order`, which also says what stages that share parameters do). All but the last stage compute their forward
again in backward, on the weights as they are then; the last one runs both together and keeps what it saved. A step of
the job takes M micro-batches through the pipeline: it fills at the beginning and drains at the end, and a large M makes
that cheap.

A forward of micro-batch k reads weights that lack the updates with the micro-batches still under way. `weights` says
what is done about it: `current` nothing (FTPipe: backward has what is newest); `stash` keeps the version of a
micro-batch's forward for its backward (PipeDream), one copy of the weights for each version under way; `predict`
forwards on what the optimizer is expected to have made of the weights by the time of the update (SpecTrain, XPipe).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ...ir import ops
from ...ir.errors import PassError
from ...ir.precision import Precision
from ...ir.program import Interface
from ..draft import Draft
from ..optimizer.timing import tie_groups
from .async_emitter import AsyncEmitter
from .async_order import Alternating, recomputed, staleness_of
from .flow import Flow, Placed
from .schedule import Schedule

WEIGHTS = ("current", "stash", "predict")


@dataclass(frozen=True)
class ScheduleAsync(Schedule):
    """Raises `PassError` for what asynchronous training cannot do: clipping by the norm of all gradients, fp16,
    copies of the pipeline, and stages before the last that must not be computed again."""

    name: ClassVar[str] = "schedule-async"
    gives: ClassVar[tuple[str, ...]] = ("programs", "remat", "tiers", "optimizer")
    order: ClassVar[str] = "async"
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
        flow = Flow(self.interface(draft), draft.devices)
        staleness = staleness_of(flow)
        again = recomputed(flow)
        _check_rematerialisable(flow, again)
        trained = [spec.name for spec in flow.specs if spec.trained_params]
        most = flow.interface.micro_batches - 1
        return {
            "schedule": self.order,
            "rematerialise": again,
            "fetch": {},
            "optimizer": dict.fromkeys(trained, ops.DEVICE),
            "staleness": {
                **{s.name: min(staleness.distance[s.name], most) for s in flow.specs if staleness.has_own(s)},
                **{group: min(staleness.of_shared, most) for group in flow.interface.groups},
            },
        }

    def turns(self, flow: Flow, draft: Draft) -> Sequence[Placed]:
        return Alternating(flow, draft).run()

    def interface(self, draft: Draft) -> Interface:
        return replace(super().interface(draft), groups=tie_groups(draft), asynchronous=True)

    def emitter(self, flow: Flow, device: int, turns: Sequence[Placed]) -> AsyncEmitter:
        return AsyncEmitter(flow, device, turns, self.weights)


def _check_options(draft: Draft) -> None:
    options = draft.options
    if options.max_grad_norm is not None:
        raise PassError(
            f"max_grad_norm={options.max_grad_norm:g}: an asynchronous stage is updated before the gradients of the "
            "stages in front of it exist, so that there is no norm over all of them, and clipping each stage by its "
            'own norm is another training. Leave max_grad_norm out, or use a synchronous strategy, such as "ftpipe"'
        )
    if Precision.of(options.precision).scales_loss:
        raise PassError(
            'precision="fp16-mixed": whether a step counts is known when all gradients of a micro-batch are there, but '
            'asynchronous stages are updated before. Use precision="bf16-mixed" or "fp32", or a synchronous strategy'
        )
    if draft.graph.hooks:
        raise PassError(
            f"{min(draft.graph.hooks)} has a gradient hook, which runs on the gradient of a whole batch, but an "
            "asynchronous stage never has that: remove the hook (handle.remove()), or use a synchronous strategy"
        )
    if draft.graph.changes:
        raise PassError(
            f"forward changes {min(draft.graph.changes)} in place ({next(iter(draft.graph.changes.values())).source}), "
            "which reaches other versions of the weights in asynchronous training than in eager: leave it out, or use "
            "a synchronous strategy"
        )
    if (copies := len(draft.mesh.lanes)) > 1:
        raise PassError(
            f"mesh makes {copies} copies of the pipeline, whose updates would have to wait for each other; "
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
