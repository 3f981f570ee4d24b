"""`schedule-pipeline`: one program per device, synchronous fill and drain (Mobius 3.1; GPipe where S = N).

In: stages on devices. Out: `draft.programs`: every device runs each of its stages forward on all micro-batches, in
stage order, then backward in reverse stage order. All weights are resident and all saved tensors kept; later passes
change that. The gradients are results of the step until `insert-optimizer` consumes them.

A value that several stages read is sent once per device. Its gradients are added on each reading device, sent back
once, and added again at the producer. A device sends in the order of its turns and receives in the order in which all
devices' turns are expected to end: one order for all messages, so no two streams can wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base import Pass, require_own
from ..draft import Draft
from .durations import ended_in_turn
from .emitter import Emitter, interface_of
from .flow import Flow


@dataclass(frozen=True)
class SchedulePipeline(Pass):
    name: ClassVar[str] = "schedule-pipeline"
    needs: ClassVar[tuple[str, ...]] = ("stages", "devices")
    gives: ClassVar[tuple[str, ...]] = ("programs",)
    decides: ClassVar[str] = "schedule"

    def plan(self, draft: Draft) -> str:
        return "fill-drain"

    def rewrite(self, draft: Draft, decision: str) -> None:
        require_own(self, "schedule", decision, self.plan(draft))
        flow = Flow(interface_of(draft), draft.devices)
        order = ended_in_turn(flow, draft.hardware, draft.options.precision)
        draft.programs = [Emitter(flow, device, order).step() for device in range(flow.interface.num_devices)]
