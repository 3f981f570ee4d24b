"""`schedule-one-by-one`: a micro-batch begins when the one before it has ended.

In: stages on devices. Out: `draft.programs`: devices wait for each other, and hold saved tensors of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.passes.draft import Draft
from penstock.passes.schedule.flow import Flow, Placed, Turn
from penstock.passes.schedule.schedule import Schedule
from penstock.passes.schedule.timetable import ended_in_turn


@dataclass(frozen=True)
class ScheduleOneByOne(Schedule):
    name: ClassVar[str] = "schedule-one-by-one"
    word: ClassVar[str] = "one-by-one"

    def turns(self, flow: Flow, draft: Draft) -> Sequence[Placed]:
        return ended_in_turn(flow, draft, {device: both_ways(flow, device) for device in flow.devices})


def both_ways(flow: Flow, device: int) -> list[Turn]:
    """A device's turns: of each micro-batch the forwards, then the backwards in reverse order."""
    stages = [spec.name for spec in flow.on(device)]
    trained = [name for name in reversed(stages) if name in flow.trained]
    return [
        Turn(name, micro_batch, is_backward)
        for micro_batch in range(flow.interface.micro_batches)
        for is_backward, names in ((False, stages), (True, trained))
        for name in names
    ]
