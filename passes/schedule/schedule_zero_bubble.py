"""`schedule-zero-bubble`: backwards are split, and the gradients of parameters fill the bubbles (Qi et al., Zero Bubble
Pipeline Parallelism, 2024: ZB-H1).

In: stages on devices, any number a device. Out: `draft.programs`. What the stage before waits for, the gradients of a
stage's inputs, is made as soon as it can be (`backward_input`); those of parameters (`backward_weight`) wait until the
device has nothing else to do, or until the stage may hold no further micro-batch. No stage holds more of them than the
fullest does under `schedule-1f1b`, from its forward until the second half of its backward; so the last devices may hold
as many as the first. With equal stages, one on each of S devices, forward F, input half B and weight half W the bubble
shrinks from (S - 1) (F + B + W) to (S - 1) (F + B - W).

A stage that hands no gradient back has a whole backward, for which nobody waits either; so has, without waiting, one
whose parameters are frozen. Orders come from list schedules of the whole pipeline with estimated times, the shortest of
a few. Gradients are added in the order of `schedule-pipeline`: training is bit for bit the same.

What works with it: `insert-remat` (the first half computes forward again) and `insert-fetch` (a stage's weights stay
from its first half of a backward on). `choose-activations` takes whole backwards only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import StageSpec
from ..base import Pass, require_own
from ..draft import Draft
from .emitter import Emitter, interface_of, number_of
from .flow import Flow, Message, Placed, Turn
from .schedule_1f1b import ListSchedule, in_order_of_ends

PATIENCE = (0.0, 0.5, 1.0)


@dataclass(frozen=True)
class ScheduleZeroBubble(Pass):
    name: ClassVar[str] = "schedule-zero-bubble"
    needs: ClassVar[tuple[str, ...]] = ("stages", "devices")
    gives: ClassVar[tuple[str, ...]] = ("programs",)
    decides: ClassVar[str] = "schedule"

    def plan(self, draft: Draft) -> str:
        return "zero-bubble"

    def rewrite(self, draft: Draft, decision: str) -> None:
        require_own(self, "schedule", decision, self.plan(draft))
        interface = interface_of(draft)
        ended = split_schedule(Flow(interface, draft.devices), draft.hardware, draft.options.precision)
        devices = range(interface.num_devices)
        flow = Flow(interface, draft.devices, {d: [turn for device, turn in ended if device == d] for d in devices})
        draft.programs = [SplitEmitter(flow, device, ended).step() for device in devices]


def split_schedule(flow: Flow, hardware: Hardware, precision: str) -> list[Placed]:
    """All turns of a step with their devices, in the order in which they end: the shortest of some."""
    found = [SplitSchedule(flow, hardware, precision, patience) for patience in PATIENCE]
    orders = [(schedule.run(), max(schedule.free_s)) for schedule in found]
    return min(orders, key=lambda row: row[1])[0]


def is_split(spec: StageSpec) -> bool:
    """Whether a stage's backward has two halves."""
    return spec.trained_params > 0 and any(i.requires_grad for i in spec.inputs)


class SplitSchedule(ListSchedule):
    """A pipeline under way. `patience`: a turn that can wait begins only where the next of the others is known to begin
    no sooner than after so much of its time."""

    def __init__(self, flow: Flow, hardware: Hardware, precision: str, patience: float):
        super().__init__(flow, hardware, precision)
        self.patience = patience
        self.split = {spec.name for spec in flow.specs if is_split(spec)}
        self.next_weight = dict.fromkeys(self.split, 0)
        self.most_held = max(self.most.values())

    def run(self) -> list[Placed]:
        """Always the turn that can begin first; of several a backward, of the earliest micro-batch, and what can wait
        last."""
        interface = self.flow.interface
        count = interface.micro_batches * (len(self.flow.specs) + len(self.flow.trained) + len(self.split))
        order: list[tuple[float, int, Placed]] = []
        while len(order) < count:
            begin_s, *_, turn = min(self.able(), key=lambda row: row[:3])
            device = self.flow.device_of[turn.stage]
            self.ended_s[turn] = self.free_s[device] = begin_s + self.lasts_s(turn)
            if turn.is_weight:
                self.next_weight[turn.stage] += 1
            else:
                self.next[turn.stage, turn.is_backward] += 1
            order.append((self.ended_s[turn], len(order), (device, turn)))
        return in_order_of_ends(order)

    def able(self) -> Iterator[tuple[float, int, int, Turn]]:
        """When each turn can begin that can, its rank among those that begin at the same time, and its micro-batch."""
        turns = [Turn(stage, m, back) for (stage, back), m in self.next.items()]
        turns += [Turn(stage, m, is_weight=True) for stage, m in self.next_weight.items()]
        begins = [(self.begin_s(turn), turn) for turn in turns]
        urgent_s = [math.inf] * len(self.free_s)
        for begin_s, turn in begins:
            if not self.can_wait(turn):
                device = self.flow.device_of[turn.stage]
                urgent_s[device] = min(urgent_s[device], begin_s)
        for begin_s, turn in begins:
            if begin_s == math.inf:
                continue
            if not self.can_wait(turn):
                yield begin_s, 0 if turn.is_backward else 1, turn.micro_batch, turn
            elif begin_s + self.patience * self.lasts_s(turn) <= urgent_s[self.flow.device_of[turn.stage]]:
                yield begin_s, 2, turn.micro_batch, turn

    def can_wait(self, turn: Turn) -> bool:
        """Whether no other stage waits for a turn."""
        spec = self.flow.interface.stages[turn.stage]
        return turn.is_weight or (turn.is_backward and not any(i.requires_grad for i in spec.inputs))

    def lasts_s(self, turn: Turn) -> float:
        forward_s, backward_s = self.took_s[turn.stage]
        if not (turn.is_backward or turn.is_weight):
            return forward_s
        late_s = self.flow.interface.stages[turn.stage].weight_share * backward_s if turn.stage in self.split else 0.0
        return late_s if turn.is_weight else backward_s - late_s

    def begin_s(self, turn: Turn) -> float:
        if not turn.is_weight:
            return super().begin_s(turn)
        first_s = self.ended_s.get(Turn(turn.stage, turn.micro_batch, is_backward=True), math.inf)
        return max(self.free_s[self.flow.device_of[turn.stage]], first_s)

    def before_forward(self, turn: Turn) -> list[float]:
        later = self.flow.specs[self.flow.specs.index(self.flow.interface.stages[turn.stage]) :]
        closing = next((s.name for s in later if s.name in self.flow.trained), None)
        if closing is not None:
            gone = self.next_weight[closing] if closing in self.split else self.next[closing, True]
            if turn.micro_batch - gone >= self.most_held:
                return [math.inf]
        return super().before_forward(turn)


class SplitEmitter(Emitter):
    """Writes one device's program with backwards in halves."""

    def __init__(self, flow: Flow, device: int, order: Sequence[Placed]):
        super().__init__(flow, device, order)
        self.rests: dict[tuple[str, int], fx.Node] = {}

    def take(self, spec: StageSpec, turn: Turn) -> None:
        if turn.is_weight:
            self.backward_weight(spec, turn.micro_batch)
        elif turn.is_backward and is_split(spec):
            self.backward_input(spec, turn.micro_batch)
        else:
            super().take(spec, turn)

    def backward_input(self, spec: StageSpec, m: int) -> None:
        douts = [self.gradient(spec, out, m) for out in spec.outputs]
        wanted = [i for i in spec.inputs if i.requires_grad]
        *dinputs, self.rests[spec.name, m] = self.program.emit(
            ops.backward_input,
            spec.name,
            self.weights[spec.name],
            self.kept[spec.name, m],
            [self.values[Message(i.name, m)] for i in spec.inputs],
            douts,
            micro_batch=m,
            names=[*(f"d_{i.name}_m{m}_s{number_of(spec)}" for i in wanted), f"rest{number_of(spec)}_m{m}"],
        )
        self.hand_back(spec, m, dinputs)

    def backward_weight(self, spec: StageSpec, m: int) -> None:
        operands = (spec.name, self.weights[spec.name], self.rests[spec.name, m], self.grads.get(spec.name))
        names = [f"g{number_of(spec)}_m{m}"]
        (self.grads[spec.name],) = self.program.emit(ops.backward_weight, *operands, micro_batch=m, names=names)
