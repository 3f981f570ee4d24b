"""The order of an asynchronous pipeline: what each device does one behind the other (FTPipe 4, work scheduling).

A stage at distance d from the end (the longest way over other stages) does d + 1 forwards, then backward and forward in
turn; behind each backward it is updated with that micro-batch's gradients. So its forward of micro-batch k reads what
max(0, k - d) updates have made.

A parameter that several stages share has a copy in each, updated with the sum of all their gradients of a micro-batch.
With D the largest distance among such stages, one at distance d updates its copy with micro-batch k behind its backward
of micro-batch k + D - d, when the backward of k has had the time to reach the first of them and the sum to come back.
So all of them forward micro-batch k on version max(0, k - D) of what they share, and every copy is the same at every
version; a stage nearer to the end than D has its backward on version max(0, k - (D - d)) of that, and holds the shared
gradients, but no others, of D - d + 1 micro-batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...ir.machine.hardware import Hardware
from ...ir.program import StageSpec
from .durations import Durations
from .flow import Flow, Turn


@dataclass(frozen=True)
class AsyncUpdate:
    """A stage is updated with one micro-batch's gradients; of its own parameters, or of those that it shares."""

    stage: str
    micro_batch: int
    is_shared: bool = False


@dataclass(frozen=True)
class Share:
    """The gradients of parameters that these stages of a device share are added up, of one micro-batch: as soon as all
    of them are there, so that nobody waits for it at the update."""

    stages: tuple[str, ...]
    micro_batch: int


AsyncTurn = Turn | AsyncUpdate | Share


def distances(flow: Flow) -> dict[str, int]:
    """Per stage how many stages lie behind it on the longest way to an end."""
    found: dict[str, int] = {}
    for spec in reversed(flow.specs):
        readers = {reader for out in spec.outputs for reader in flow.readers[out.name]}
        found[spec.name] = max((found[reader] + 1 for reader in readers), default=0)
    return found


@dataclass(frozen=True)
class Staleness:
    """Updates between the weights of a forward and the update with its gradients, once as many micro-batches have
    passed: of a stage's own parameters its `distance` to the end, of those that stages share that of the first such.
    `shared`: stage -> trained parameters that it shares."""

    distance: Mapping[str, int]
    shared: Mapping[str, Collection[str]]

    @property
    def of_shared(self) -> int:
        return max((self.distance[name] for name in self.shared), default=0)

    def lag(self, stage: str) -> int:
        """Backwards of later micro-batches that a stage does before it updates what it shares with one's gradients."""
        return self.of_shared - self.distance[stage]

    def has_own(self, spec: StageSpec) -> bool:
        """Whether a stage trains parameters that it does not share."""
        return any(p.requires_grad and p.name not in self.shared.get(spec.name, ()) for p in spec.params)


def sequence(spec: StageSpec, flow: Flow, staleness: Staleness) -> list[AsyncTurn]:
    """What one stage does, in order."""
    name, count, ahead = spec.name, flow.interface.micro_batches, staleness.distance[spec.name] + 1
    if name not in flow.trained:
        return [Turn(name, m) for m in range(count)]
    own = staleness.has_own(spec)
    lag, shared = (staleness.lag(name), range(count)) if name in staleness.shared else (0, range(0))
    steps: list[AsyncTurn] = [Turn(name, m) for m in range(min(ahead, count))]
    for m in range(count):
        steps.append(Turn(name, m, True))
        if own:
            steps.append(AsyncUpdate(name, m))
        if m - lag in shared:
            steps.append(AsyncUpdate(name, m - lag, True))
        if m + ahead < count:
            steps.append(Turn(name, m + ahead))
    return steps + [AsyncUpdate(name, m, True) for m in shared if m >= count - lag]


def recomputed(flow: Flow) -> list[str]:
    """The stages whose backward computes the forward again: all that have one but the last."""
    distance = distances(flow)
    return [spec.name for spec in flow.specs if spec.name in flow.trained and distance[spec.name]]


def alternate(flow: Flow, hardware: Hardware, precision: str, staleness: Staleness) -> list[tuple[int, AsyncTurn]]:
    """All that the devices do in a call, each with its device, in the order in which it ends."""
    return _Alternating(flow, hardware, precision, staleness).run()


class _Alternating(Durations):
    """A pipeline under way: what each stage has still to do, and what has ended when."""

    def __init__(self, flow: Flow, hardware: Hardware, precision: str, staleness: Staleness):
        self.staleness = staleness
        self.recomputed = frozenset(recomputed(flow))
        super().__init__(flow, hardware, precision)
        self.todo = {spec.name: deque(sequence(spec, flow, staleness)) for spec in flow.specs}
        self.ended_s: dict[Turn, float] = {}
        self.free_s = [0.0] * flow.interface.num_devices
        self.order: list[tuple[float, int, tuple[int, AsyncTurn]]] = []
        self.sharing = {d: tuple(s.name for s in flow.on(d) if s.name in staleness.shared) for d in flow.turns}

    def seconds(self, spec: StageSpec, precision: str) -> tuple[float, float]:
        """All but the last stages compute their forward again."""
        forward_s, backward_s = super().seconds(spec, precision)
        return forward_s, backward_s + (forward_s if spec.name in self.recomputed else 0.0)

    def run(self) -> list[tuple[int, AsyncTurn]]:
        """Always what can begin first; of several an update, then a backward, of the earliest micro-batch."""
        while any(self.todo.values()):
            able = [self.able(name) for name, steps in self.todo.items() if steps]
            begin_s, *_, step = min(able, key=lambda row: row[:4])
            assert begin_s < math.inf, "stages wait for each other"
            self.do(step, begin_s)
        return [placed for _, _, placed in sorted(self.order, key=lambda row: row[:2])]

    def able(self, name: str) -> tuple[float, int, int, int, AsyncTurn]:
        """When a stage's next step can begin, and what it is; infinity while something must end first."""
        step, device = self.todo[name][0], self.flow.device_of[name]
        place = self.flow.place[name]
        if isinstance(step, AsyncUpdate):
            summed_s = self.summed_s(step.micro_batch) if step.is_shared else 0.0
            return max(self.free_s[device], summed_s), 0, step.micro_batch, place, step
        assert not isinstance(step, Share), "stages have turns and updates to do"
        waits = self.before_backward(step) if step.is_backward else self.before_forward(step)
        begin_s = max([self.free_s[device], *waits])
        return begin_s, 1 if step.is_backward else 2, step.micro_batch, place, step

    def summed_s(self, m: int) -> float:
        """When a micro-batch's gradients of all stages that share parameters are there."""
        return max(self.ended_s.get(Turn(stage, m, True), math.inf) for stage in self.staleness.shared)

    def before_forward(self, turn: Turn) -> list[float]:
        """A stage without backward runs as far ahead as one that has one would."""
        if turn.stage in self.flow.trained:
            return self.arrivals_s(turn)
        later = self.flow.specs[self.flow.place[turn.stage] :]
        closing = next((s.name for s in later if s.name in self.flow.trained), None)
        before = turn.micro_batch - self.staleness.distance[turn.stage] - 1
        if closing is not None and before >= 0 and Turn(closing, before, True) not in self.ended_s:
            return [math.inf]
        return self.arrivals_s(turn)

    def before_backward(self, turn: Turn) -> list[float]:
        """The gradient of what several stages of a device read leaves behind the backward of the first of them."""
        spec, here = self.flow.interface.stages[turn.stage], self.flow.device_of[turn.stage]
        later = {
            reader
            for value in spec.inputs
            for reader in self.flow.learners[value.name]
            if self.flow.device_of[reader] == here and self.flow.place[reader] > self.flow.place[spec.name]
        }
        waits = [self.ended_s.get(Turn(reader, turn.micro_batch, True), math.inf) for reader in later]
        return waits + self.arrivals_s(turn)

    def arrivals_s(self, turn: Turn) -> list[float]:
        device_of = self.flow.device_of
        here = device_of[turn.stage]
        return [
            self.ended_s.get(made, math.inf) + self.moving_s(device_of[made.stage], here, value)
            for made, value in self.flow.needed(turn)
        ]

    def do(self, step: AsyncTurn, begin_s: float) -> None:
        assert not isinstance(step, Share)
        device = self.flow.device_of[step.stage]
        self.todo[step.stage].popleft()
        took_s = 0.0
        if isinstance(step, Turn):
            took_s = self.took_s[step.stage][step.is_backward]
            self.ended_s[step] = begin_s + took_s
        self.free_s[device] = begin_s + took_s
        self.order.append((self.free_s[device], len(self.order), (device, step)))
        if isinstance(step, Turn) and step.is_backward and step.stage in self.staleness.shared:
            self.share(step.micro_batch)
        if isinstance(step, Turn) and not step.is_backward and not self.staleness.distance[step.stage]:
            self.together(step)

    def share(self, m: int) -> None:
        """Behind the last of the backwards of stages that share parameters."""
        end_s = self.summed_s(m)
        for device, stages in self.sharing.items() if end_s < math.inf else ():
            if stages:
                self.order.append((end_s, len(self.order), (device, Share(stages, m))))

    def together(self, turn: Turn) -> None:
        """The last stage's backward follows its forward at once."""
        following = self.todo[turn.stage][0] if self.todo[turn.stage] else None
        if following == Turn(turn.stage, turn.micro_batch, True):
            begin_s = max([self.free_s[self.flow.device_of[turn.stage]], *self.before_backward(following)])
            if begin_s < math.inf:
                self.do(following, begin_s)
