"""`schedule-pipeline`: synchronous fill and drain (Mobius 3.1; GPipe where S = N).

In: stages on devices. Out: `draft.programs`: every device runs each of its stages forward on all micro-batches, in
stage order, then backward in reverse stage order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..base import Pass
from ..draft import Draft
from .flow import Flow, Placed, Turn
from .schedule import Schedule
from .timetable import ended_in_turn


@dataclass(frozen=True)
class SchedulePipeline(Schedule):
    name: ClassVar[str] = "schedule-pipeline"
    rank: ClassVar[int] = 50
    word: ClassVar[str] = "fill-drain"
    takes_copies: ClassVar[bool] = True

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        """All but the schedule's name, since it is the usual one."""
        return super().label(passes)[1:]

    def turns(self, flow: Flow, draft: Draft) -> Sequence[Placed]:
        return ended_in_turn(flow, draft, {d: flow.forwards(d) + backwards(flow, d) for d in flow.devices})


def backwards(flow: Flow, device: int) -> list[Turn]:
    """The backwards of a device in reverse stage order, each stage on all micro-batches."""
    back = [spec.name for spec in reversed(flow.on(device)) if spec.name in flow.trained]
    return [Turn(name, m, is_backward=True) for name in back for m in flow.micro_batches(name, device)]
