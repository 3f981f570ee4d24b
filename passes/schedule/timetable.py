"""The expected begin and end of the turns of all devices, and so the order in which they end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from ...graph.costs.stage_time import MessageTimes, stage_seconds
from ..draft import Draft
from .flow import Flow, Placed, StageAction, Turn

Able = tuple[float, int, int, StageAction]  # when it can begin, rank among those that begin then, micro-batch


class Timetable:
    """A step under way: which turns have ended, and when. A subclass says what can be next (`able`), and what a turn
    waits for besides its device and its inputs (`waits_s`)."""

    def __init__(self, flow: Flow, draft: Draft):
        self.flow, self.messages = flow, MessageTimes(draft.lane_hardware)
        self.took_s = {
            spec.name: stage_seconds(spec, device, draft.options.precision, spec.name in flow.trained)
            for spec in flow.specs
            for device in [draft.lane_hardware.devices[flow.device_of[spec.name]]]
        }
        self.ended_s: dict[StageAction, float] = {}
        self.ready_s: dict[Turn, float] = {}  # when all that a turn waits for has ended, which nothing changes then
        self.free_s = [0.0] * flow.interface.num_devices
        self.ends: list[tuple[float, Placed]] = []

    def run(self) -> list[Placed]:
        """Always do what can begin first. Returns all that the devices do, in the order in which it ends."""
        while able := list(self.able()):
            begin_s, *_, action = min(able, key=lambda row: row[:3])
            assert begin_s < math.inf, "stages wait for each other"
            self.do(action, begin_s)
        return self.order()

    def able(self) -> Iterable[Able]:
        """The actions that may be next; none when all are done."""
        raise NotImplementedError

    def do(self, action: StageAction, begin_s: float) -> None:
        device = self.device(action)
        self.ended_s[action] = self.free_s[device] = begin_s + self.lasts_s(action)
        self.ends.append((self.free_s[device], (device, action)))

    def order(self) -> list[Placed]:
        """Everything done with its device, in the order in which it ends; equal ends as they were found."""
        return [placed for _, placed in sorted(self.ends, key=lambda row: row[0])]

    def begin_s(self, turn: Turn) -> float:
        """The seconds at which a turn can begin; infinity while it waits for something whose end is not known yet."""
        ready_s = self.ready_s.get(turn)
        if ready_s is None:
            ready_s = max(self.waits_s(turn), default=0.0)
            if ready_s < math.inf:
                self.ready_s[turn] = ready_s
        return max(self.free_s[self.device(turn)], ready_s)

    def device(self, action: StageAction) -> int:
        """The device of an action; a stage that is updated has one only."""
        if isinstance(action, Turn):
            return self.flow.device_at(action.stage, action.micro_batch)
        return self.flow.device_of[action.stage]

    def waits_s(self, turn: Turn) -> list[float]:
        """The times at which the values that a turn reads from other stages are on its device."""
        here = self.device(turn)
        return [
            self.ended_s.get(made, math.inf) + self.messages.seconds(self.device(made), here, value.bytes)
            for made, value in self.flow.sources(turn)
        ]

    def lasts_s(self, action: StageAction) -> float:
        if not isinstance(action, Turn):
            return 0.0
        took = self.took_s[action.stage]
        return took.backward_s if action.is_backward else took.forward_s


def ended_in_turn(flow: Flow, draft: Draft, turns: Mapping[int, Sequence[Turn]]) -> list[Placed]:
    """All turns with their devices, in the order in which they end if every device keeps to its own order."""
    table = Timetable(flow, draft)
    waiting = {device: deque(own) for device, own in turns.items() if own}
    while waiting:
        before = len(table.ends)
        for device, own in list(waiting.items()):
            while own and (begin_s := table.begin_s(own[0])) < math.inf:
                table.do(own.popleft(), begin_s)
            if not own:
                del waiting[device]
        assert len(table.ends) > before, "devices wait for each other's turns"
    return table.order()
