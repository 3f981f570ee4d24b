"""`schedule-zero-bubble`: backwards are split, and the gradients of parameters fill the bubbles (Qi et al., Zero Bubble
Pipeline Parallelism, 2024: ZB-H1).

In: stages on devices, any number a device. Out: `draft.programs`. The gradients of a stage's inputs, for which the
stage before waits, are made as soon as they can be (`backward_input`); those of parameters (`backward_weight`) wait
until the device has nothing else to do, or until the stage may hold no further micro-batch. No stage holds more
micro-batches, from forward to the second half of backward, than the fullest one does under `schedule-1f1b`; so the last
devices may hold no more than the first. With equal stages, one on each of S devices, forward F, input half B and weight
half W the bubble shrinks from (S - 1) (F + B + W) to (S - 1) (F + B - W).

A stage that hands no gradient back has a whole backward, for which no other stage waits; a stage whose parameters are
frozen has a whole backward that does not wait. Orders come from list schedules of the whole pipeline with estimated
times, the shortest of a few. Gradients are added in the order of `schedule-pipeline`: training is bit for bit the same.

What works with it: `insert-remat` (the first half computes forward again) and `insert-fetch` (a stage's weights stay
from its first half of a backward on). `choose-activations` takes whole backwards only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...runtime.stage.split_backward import require_halves
from ..draft import Draft
from .flow import Flow, Placed, StageAction, Turn
from .schedule import Schedule
from .schedule_1f1b import BackwardFirst
from .timetable import Able

PATIENCE = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class ScheduleZeroBubble(Schedule):
    name: ClassVar[str] = "schedule-zero-bubble"
    rank: ClassVar[int] = 53
    word: ClassVar[str] = "zero-bubble"
    splits_backward: ClassVar[bool] = True

    def turns(self, flow: Flow, draft: Draft) -> Sequence[Placed]:
        """The shortest of several orders, one per patience. Raises `PlanError` where torch's halves are wrong."""
        require_halves()
        tables = [WeightsLast(flow, draft, patience) for patience in PATIENCE]
        orders = [(table.run(), max(table.free_s)) for table in tables]
        return min(orders, key=lambda row: row[1])[0]


class WeightsLast(BackwardFirst):
    """A step under way, with backwards in halves. `patience`: a turn that can wait begins only where no other turn of
    its device is known to begin before this share of its time is over."""

    def __init__(self, flow: Flow, draft: Draft, patience: float):
        super().__init__(flow, draft)
        self.patience = patience
        both = [spec for spec in flow.specs if spec.trained_params > 0 and any(i.requires_grad for i in spec.inputs)]
        self.split = {spec.name for spec in both}  # their backward has two halves
        self.last = {spec.name for spec in flow.specs if not any(i.requires_grad for i in spec.inputs)}
        self.next |= {(spec.name, False, True): 0 for spec in flow.specs if spec.name in self.split}
        self.most_held = max(self.most.values())

    def able(self) -> Iterator[Able]:
        """Turns that can wait come last, and not at all where they would delay another turn."""
        begins = [(self.begin_s(turn), self.can_wait(turn), turn) for turn in self.next_turns()]
        urgent_s = [math.inf] * len(self.free_s)
        for begin_s, can_wait, turn in begins:
            if not can_wait:
                device = self.flow.device_of[turn.stage]
                urgent_s[device] = min(urgent_s[device], begin_s)
        for begin_s, can_wait, turn in begins:
            if not can_wait:
                yield begin_s, 0 if turn.is_backward else 1, turn.micro_batch, turn
            elif begin_s + self.patience * self.lasts_s(turn) <= urgent_s[self.flow.device_of[turn.stage]]:
                yield begin_s, 2, turn.micro_batch, turn

    def can_wait(self, turn: Turn) -> bool:
        """Whether no other stage waits for a turn."""
        return turn.is_weight or (turn.is_backward and turn.stage in self.last)

    def lasts_s(self, action: StageAction) -> float:
        whole_s = super().lasts_s(action)
        if not isinstance(action, Turn) or action.stage not in self.split:
            return whole_s
        late_s = self.flow.interface.stages[action.stage].weight_share * self.took_s[action.stage].backward_s
        return late_s if action.is_weight else whole_s - late_s if action.is_backward else whole_s

    def waits_s(self, turn: Turn) -> list[float]:
        if turn.is_weight:
            return [self.ended_s.get(Turn(turn.stage, turn.micro_batch, is_backward=True), math.inf)]
        return super().waits_s(turn)

    def forward_waits_s(self, turn: Turn) -> list[float]:
        closing = self.flow.closing[turn.stage]
        if closing is not None:
            gone = self.next[closing, closing not in self.split, closing in self.split]
            if turn.micro_batch - gone >= self.most_held:
                return [math.inf]
        return super().forward_waits_s(turn)
