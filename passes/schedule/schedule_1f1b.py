"""`schedule-1f1b`: each device does a backward as soon as one is possible, else a forward (PipeDream's one forward, one
backward, with the pipeline drained at the end of the step, so that training is synchronous).

In: stages on devices, any number a device. Out: `draft.programs`, which differ from those of `schedule-pipeline` in
their order: fewer micro-batches wait for their backward at the same time, so less is kept. The orders come from a list
schedule of the whole pipeline with estimated times. A stage holds at most the number of micro-batches that pass the
slowest device while one goes from the stage to the loss and back: S - s for stage s of S equal stages on S devices.

Backwards of a device follow the reverse order of stages within each micro-batch, so gradients are added as in
`schedule-pipeline`: training is bit for bit the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...ir.program import StageSpec
from ..draft import Draft
from .flow import Flow, Placed, StageAction, Turn
from .schedule import Schedule
from .timetable import Able, Timetable

ROUNDING = 1e-9  # is taken from a ratio of seconds before that is rounded up to whole micro-batches


@dataclass(frozen=True)
class Schedule1F1B(Schedule):
    name: ClassVar[str] = "schedule-1f1b"
    rank: ClassVar[int] = 51
    word: ClassVar[str] = "1f1b"
    takes_copies: ClassVar[bool] = True

    def turns(self, flow: Flow, draft: Draft) -> Sequence[Placed]:
        return BackwardFirst(flow, draft).run()


class BackwardFirst(Timetable):
    """A step under way. Of the turns that can begin first, backwards go first, then earlier micro-batches."""

    def __init__(self, flow: Flow, draft: Draft):
        super().__init__(flow, draft)
        self.on_device_s = [
            sum(self.took_s[s.name].both_s / len(flow.copies[s.name]) for s in flow.on(d)) for d in flow.devices
        ]
        self.most = {spec.name: self.most_in_flight(spec) for spec in flow.specs}
        self.after: dict[str, str | None] = {}  # the stage whose backward comes just before one's own on its device
        after: dict[int, str] = {}
        for spec in reversed(flow.specs):
            device = flow.device_of[spec.name]
            self.after[spec.name] = after.get(device)
            if spec.name in flow.trained:
                after[device] = spec.name
        # The micro-batch of the next turn, by stage, whether a backward, and whether the second half of one.
        halves = [(spec.name, back) for spec in flow.specs for back in (False, True)]
        self.next = {(name, back, False): 0 for name, back in halves if not back or name in flow.trained}

    def most_in_flight(self, spec: StageSpec) -> int:
        """Micro-batches that a stage may hold: enough to keep the slowest device busy until the first comes back."""
        later = self.flow.specs[self.flow.specs.index(spec) :]
        slowest_s = max(self.on_device_s)
        round_trip_s = sum(self.took_s[s.name].both_s for s in later)
        return max(1, math.ceil(round_trip_s / slowest_s - ROUNDING)) if slowest_s > 0 else len(later)

    def able(self) -> Iterator[Able]:
        for turn in self.next_turns():
            yield self.begin_s(turn), 0 if turn.is_backward else 1, turn.micro_batch, turn

    def next_turns(self) -> list[Turn]:
        todo = self.flow.interface.micro_batches
        return [Turn(stage, m, back, weight) for (stage, back, weight), m in self.next.items() if m < todo]

    def do(self, action: StageAction, begin_s: float) -> None:
        super().do(action, begin_s)
        assert isinstance(action, Turn)
        self.next[action.stage, action.is_backward, action.is_weight] += 1

    def waits_s(self, turn: Turn) -> list[float]:
        return (self.backward_waits_s(turn) if turn.is_backward else self.forward_waits_s(turn)) + super().waits_s(turn)

    def forward_waits_s(self, turn: Turn) -> list[float]:
        closing = self.flow.closing[turn.stage]
        is_full = closing is not None and turn.micro_batch - self.next[closing, True, False] >= self.most[turn.stage]
        return [math.inf] if is_full else []

    def backward_waits_s(self, turn: Turn) -> list[float]:
        before = [Turn(turn.stage, turn.micro_batch)]
        if (after := self.after[turn.stage]) is not None:  # this one in turn waits for later stages
            before.append(Turn(after, turn.micro_batch, is_backward=True))
        return [self.ended_s.get(other, math.inf) for other in before]
