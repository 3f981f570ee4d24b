"""`schedule-data-parallel`: every device runs the whole model on an equal share of the micro-batches.

In: stages that are everywhere. Out: `draft.programs`, alike but for their micro-batches: device d of N takes those from
d M / N to (d + 1) M / N - 1. A device does one micro-batch after the other, forward and backward, so that the saved
tensors of one are there at a time; with `by_stage`, each stage on the whole share before the next, so that weights
which come from elsewhere come once a phase. What is returned are each device's own gradients: `insert-optimizer` adds
them up over the devices, or those passes that spread them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..runtime.errors import PassError
from .base import REPLICAS, Draft, Pass, require_own
from .schedule_pipeline import Emitter, interface_of, shared_flow


@dataclass(frozen=True)
class ScheduleDataParallel(Pass):
    """Raises `PassError` where the micro-batches cannot be shared out equally, or a stage's forward changes a buffer:
    the devices' copies of that would drift apart."""

    name: ClassVar[str] = "schedule-data-parallel"
    needs: ClassVar[tuple[str, ...]] = ("stages", "replicas")
    gives: ClassVar[tuple[str, ...]] = ("programs",)
    decides: ClassVar[str] = "schedule"
    by_stage: bool = False

    def plan(self, draft: Draft) -> str:
        return "replicas-by-stage" if self.by_stage else "replicas"

    def rewrite(self, draft: Draft, decision: str) -> None:
        require_own(self, "schedule", decision, self.plan(draft))
        _check_shares(draft)
        _check_buffers(draft)
        face = interface_of(draft)
        face = replace(face, groups={REPLICAS: tuple((device, "", "") for device in range(face.num_devices))})
        draft.programs = []
        for device in range(face.num_devices):
            flow = shared_flow(face, device)
            if not self.by_stage:
                share = sorted({turn.micro_batch for turn in flow.turns[device]})
                flow.turns[device] = [turn for m in share for turn in flow.fill_drain(device, [m])]
            draft.programs.append(Emitter(flow, device, []).step())


def _check_shares(draft: Draft) -> None:
    count, devices = draft.options.micro_batches, draft.hardware.num_devices
    if count % devices:
        near = max(devices, round(count / devices) * devices)
        raise PassError(
            f"{count} micro-batches cannot be shared out equally among {devices} devices; the nearest micro_batches "
            f"that can is {near}"
        )


def _check_buffers(draft: Draft) -> None:
    changed = next((n for n in draft.graph.nodes if n.meta.get("updates_buffers")), None)
    if changed is not None and draft.hardware.num_devices > 1:
        raise PassError(
            f"{changed.name} ({changed.meta.get('source', '')}) changes a buffer in every forward, such as the running "
            "statistics of a batch normalisation; devices that train on different micro-batches would each have their "
            'own. Use a pipeline, such as strategy="gpipe", or freeze the statistics'
        )
