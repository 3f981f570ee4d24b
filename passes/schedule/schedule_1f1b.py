"""`schedule-1f1b`: each device does a backward as soon as one is possible, else a forward (PipeDream's one forward, one
backward, with the pipeline drained at the end of the step, so that training is synchronous).

In: stages on devices, any number a device. Out: `draft.programs`, as of `schedule-pipeline` but for the order: fewer
micro-batches wait for their backward at the same time, so less is kept. The orders come from a list schedule of the
whole pipeline with estimated times. A stage holds at most as many micro-batches as pass the slowest device while one
goes from the stage to the loss and back; with equal stages, one on each device, stage s of S holds S - s.

Every device's messages leave in the order in which their producers end in that schedule, and all devices receive in
that same order, so no two streams wait for each other. Backwards of a device follow the reverse order of stages within
each micro-batch, so gradients are added as by `schedule-pipeline`: training is bit for bit the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ...ir.machine.hardware import Hardware
from ...ir.program import StageSpec
from ..base import Pass, require_own
from ..draft import Draft
from .durations import Durations
from .emitter import Emitter, interface_of
from .flow import Flow, Placed, Turn

ROUNDING = 1e-9  # of a ratio of seconds, before it is rounded up to whole micro-batches


@dataclass(frozen=True)
class Schedule1F1B(Pass):
    name: ClassVar[str] = "schedule-1f1b"
    needs: ClassVar[tuple[str, ...]] = ("stages", "devices")
    gives: ClassVar[tuple[str, ...]] = ("programs",)
    decides: ClassVar[str] = "schedule"

    def plan(self, draft: Draft) -> str:
        return "1f1b"

    def rewrite(self, draft: Draft, decision: str) -> None:
        require_own(self, "schedule", decision, self.plan(draft))
        interface = interface_of(draft)
        ended = list_schedule(Flow(interface, draft.devices), draft.hardware, draft.options.precision)
        devices = range(interface.num_devices)
        flow = Flow(interface, draft.devices, {d: [turn for device, turn in ended if device == d] for d in devices})
        draft.programs = [Emitter(flow, device, ended).step() for device in devices]


def list_schedule(flow: Flow, hardware: Hardware, precision: str) -> list[Placed]:
    """All turns of a step with their devices, in the order in which they end."""
    return ListSchedule(flow, hardware, precision).run()


def in_order_of_ends(rows: list[tuple[float, int, Placed]]) -> list[Placed]:
    """Of turns with their ends, equal ends as they were found."""
    return [placed for _, _, placed in sorted(rows, key=lambda row: row[:2])]


class ListSchedule(Durations):
    """A pipeline under way: which turns have ended, and when."""

    def __init__(self, flow: Flow, hardware: Hardware, precision: str):
        super().__init__(flow, hardware, precision)
        self.on_device_s = [
            sum(sum(self.took_s[s.name]) for s in flow.on(d)) for d in range(flow.interface.num_devices)
        ]
        self.most = {spec.name: self.most_in_flight(spec) for spec in flow.specs}
        # Whose backward lets go of what a forward makes, and whose comes just before a stage's own on its device.
        self.closing: dict[str, str | None] = {}
        self.behind: dict[str, str | None] = {}
        closing: str | None = None
        behind: dict[int, str] = {}
        for spec in reversed(flow.specs):
            device = flow.device_of[spec.name]
            self.behind[spec.name] = behind.get(device)
            if spec.name in flow.trained:
                closing = behind[device] = spec.name
            self.closing[spec.name] = closing
        self.ended_s: dict[Turn, float] = {}
        self.free_s = [0.0] * flow.interface.num_devices
        self.next = {(spec.name, back): 0 for spec in flow.specs for back in (False, True)}

    def most_in_flight(self, spec: StageSpec) -> int:
        """Micro-batches that a stage may hold: enough to keep the slowest device busy until the first comes back."""
        later = self.flow.specs[self.flow.specs.index(spec) :]
        slowest_s = max(self.on_device_s)
        round_trip_s = sum(sum(self.took_s[s.name]) for s in later)
        return max(1, math.ceil(round_trip_s / slowest_s - ROUNDING)) if slowest_s > 0 else len(later)

    def run(self) -> list[Placed]:
        """Always the turn that can begin first; of several a backward, of the earliest micro-batch."""
        count = self.flow.interface.micro_batches * (len(self.flow.specs) + len(self.flow.trained))
        order: list[tuple[float, int, Placed]] = []
        while len(order) < count:
            turns = [Turn(stage, m, back) for (stage, back), m in self.next.items()]
            able = [(self.begin_s(turn), not turn.is_backward, turn.micro_batch, turn) for turn in turns]
            begin_s, *_, turn = min((row for row in able if row[0] < math.inf), key=lambda row: row[:3])
            device = self.flow.device_of[turn.stage]
            end_s = begin_s + self.took_s[turn.stage][turn.is_backward]
            self.ended_s[turn] = self.free_s[device] = end_s
            self.next[turn.stage, turn.is_backward] += 1
            order.append((end_s, len(order), (device, turn)))
        return in_order_of_ends(order)

    def begin_s(self, turn: Turn) -> float:
        """When a turn can begin; infinity while something must end first that has no time yet."""
        if turn.micro_batch == self.flow.interface.micro_batches:
            return math.inf
        device = self.flow.device_of[turn.stage]
        waits = self.before_backward(turn) if turn.is_backward else self.before_forward(turn)
        return max([self.free_s[device], *waits])

    def before_forward(self, turn: Turn) -> list[float]:
        closing = self.closing[turn.stage]
        if closing is not None and turn.micro_batch - self.next[closing, True] >= self.most[turn.stage]:
            return [math.inf]
        return self.arrivals_s(turn)

    def before_backward(self, turn: Turn) -> list[float]:
        if turn.stage not in self.flow.trained:
            return [math.inf]
        m, behind = turn.micro_batch, self.behind[turn.stage]
        waits = [self.ended_s.get(Turn(turn.stage, m), math.inf)]
        if behind is not None:  # which itself comes after all that follow it
            waits.append(self.ended_s.get(Turn(behind, m, True), math.inf))
        return waits + self.arrivals_s(turn)

    def arrivals_s(self, turn: Turn) -> list[float]:
        """When all that other stages make for a turn is where it runs."""
        device_of = self.flow.device_of
        here = device_of[turn.stage]
        return [
            self.ended_s.get(made, math.inf) + self.moving_s(device_of[made.stage], here, value)
            for made, value in self.flow.needed(turn)
        ]
