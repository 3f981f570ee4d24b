"""The order of an asynchronous pipeline: what each device does, one action after the other (FTPipe 4, work scheduling).

A stage at distance d from the end (the longest way over other stages) does d + 1 forwards, then backward and forward in
turn; after the last backward of each mini-batch, which has A micro-batches, it is updated with the sum of their
gradients (A is 1 where nothing is accumulated). So its forward of micro-batch m reads what max(0, (m - d) // A) updates
have made, and its backward what m // A updates have.

A parameter that several stages share has a copy in each, updated with the sum of all their gradients of a mini-batch.
With D the largest distance among such stages, one at distance d updates its copy D - d backwards after the last one of
the mini-batch: by then this has had the time to reach the first of them, and the sum to come back. So all of them run
the forward of micro-batch m on version max(0, (m - D) // A) of what they share, and every copy is the same at every
version; a stage nearer to the end than D has its backward on version max(0, (m - (D - d)) // A) of that, and holds
the shared gradients, but no others, of the mini-batches in between.

Where gradients are clipped by their norm, or checked for overflow, an update waits for all gradients of its mini-batch
in the same way: D is then the largest distance of all trained stages, and all parameters are treated as shared ones.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from ...ir import ops
from ...ir.program import StageSpec
from ..draft import Draft
from .flow import AsyncUpdate, Flow, Share, StageAction, Turn
from .timetable import Able, Timetable


def distances(flow: Flow) -> dict[str, int]:
    """Per stage the number of stages after it on the longest way to an end."""
    found: dict[str, int] = {}
    for spec in reversed(flow.specs):
        readers = {reader for out in spec.outputs for reader in flow.readers[out.name]}
        found[spec.name] = max((found[reader] + 1 for reader in readers), default=0)
    return found


@dataclass(frozen=True)
class Staleness:
    """The number of micro-batches between the weights of a forward and the update with its gradients, once that many
    have passed: for a stage's own parameters its `distance` to the end, for what waits for several stages the largest
    distance of these. `shared`: stage -> trained parameters that it shares; `clipped`: the stages whose updates wait
    for the norm of all gradients, none where there is no norm; `accumulate`: the micro-batches of a mini-batch;
    `whole`: the stages whose gradients are not taken apart, so that those which they do not share wait for the others.
    """

    distance: Mapping[str, int]
    shared: Mapping[str, Collection[str]]
    accumulate: int = 1
    clipped: Collection[str] = ()
    whole: Collection[str] = ()

    @property
    def late(self) -> list[str]:
        """The stages of which an update waits for other stages."""
        return [name for name in self.distance if name in self.shared or name in self.clipped]

    @property
    def lateness(self) -> int:
        return max((self.distance[name] for name in self.late), default=0)

    def lag(self, stage: str) -> int:
        """The number of later backwards before a stage is updated with what waits for other stages."""
        return self.lateness - self.distance[stage]

    def has_unshared(self, spec: StageSpec) -> bool:
        """Whether a stage trains parameters that it does not share."""
        shared = self.shared.get(spec.name, ())
        return any(p.requires_grad and p.name not in shared for p in spec.params)

    def has_own(self, spec: StageSpec) -> bool:
        """Whether a stage trains parameters whose updates wait for no other stage."""
        return not self.waits(spec.name) and self.has_unshared(spec)

    def waits(self, stage: str) -> bool:
        """Whether all parameters of a stage are updated late."""
        return stage in self.clipped or (stage in self.whole and stage in self.shared)

    def updates(self, distance: int) -> int:
        """The most updates that a forward lacks of those that are before its own, at this distance."""
        return -(-distance // self.accumulate)

    def lacking(self, stage: str) -> int:
        """The most updates that a forward of a stage lacks of those of parameters that it does not share."""
        return self.updates(self.lateness if self.waits(stage) else self.distance[stage])

    def ends(self, micro_batch: int) -> bool:
        """Whether a micro-batch is the last one of its mini-batch."""
        return (micro_batch + 1) % self.accumulate == 0

    def last_of(self, mini_batch: int) -> int:
        return (mini_batch + 1) * self.accumulate - 1


def staleness_of(flow: Flow, clipped: bool = False, whole: Collection[str] = ()) -> Staleness:
    """The staleness of a flow's stages; the interface's groups are those of parameters that stages share. `clipped`:
    updates wait for the norm of all gradients; `whole`: see `Staleness`."""
    shared: dict[str, set[str]] = defaultdict(set)
    for rows in flow.interface.groups.values():
        for _, stage, param in rows:
            if stage:
                shared[stage].add(param)
    trained = [spec.name for spec in flow.specs if spec.trained_params] if clipped else []
    return Staleness(distances(flow), shared, flow.interface.accumulate, trained, whole)


def sequence(spec: StageSpec, flow: Flow, staleness: Staleness) -> list[StageAction]:
    """The actions of one stage, in order."""
    name, count, ahead = spec.name, flow.interface.micro_batches, staleness.distance[spec.name] + 1
    if name not in flow.trained:
        return [Turn(name, m) for m in range(count)]
    own, late = staleness.has_own(spec), name in staleness.late
    lag, each = staleness.lag(name) if late else 0, staleness.accumulate
    steps: list[StageAction] = [Turn(name, m) for m in range(min(ahead, count))]
    for m in range(count):
        steps.append(Turn(name, m, True))
        if own and staleness.ends(m):
            steps.append(AsyncUpdate(name, m // each))
        if late and m >= lag and staleness.ends(m - lag):
            steps.append(AsyncUpdate(name, (m - lag) // each, True))
        if m + ahead < count:
            steps.append(Turn(name, m + ahead))
    rest = [m for m in range(max(0, count - lag), count) if late and staleness.ends(m)]
    return steps + [AsyncUpdate(name, m // each, True) for m in rest]


def stages_to_recompute(flow: Flow) -> list[str]:
    """The stages whose backward computes the forward again: all that have one but the last."""
    distance = distances(flow)
    return [spec.name for spec in flow.specs if spec.name in flow.trained and distance[spec.name]]


class Alternating(Timetable):
    """A pipeline under way: what each stage has still to do, and what has ended when. Of the actions that can begin
    first, updates go before backwards, these before forwards, and earlier micro-batches first."""

    def __init__(self, flow: Flow, draft: Draft, staleness: Staleness):
        super().__init__(flow, draft)
        self.staleness = staleness
        self.recomputed = frozenset(stages_to_recompute(flow))
        self.sums_s = self.sums_seconds()
        self.lanes_s = {spec.name: self.lanes_seconds(spec, draft) for spec in flow.specs}
        self.update_s = {spec.name: self.update_seconds(spec, draft) for spec in flow.specs}
        self.todo = {spec.name: deque(sequence(spec, flow, self.staleness)) for spec in flow.specs}
        self.late = staleness.late
        self.sharing = {d: tuple(s.name for s in flow.on(d) if s.name in set(self.late)) for d in flow.devices}

    def able(self) -> Iterator[Able]:
        """The next action of each stage."""
        for action in (actions[0] for actions in self.todo.values() if actions):
            if isinstance(action, AsyncUpdate):
                last = Turn(action.stage, self.staleness.last_of(action.mini_batch), True)
                summed_s = self.ended_s[last] + self.lanes_s[action.stage]
                if action.is_shared:
                    summed_s = max(summed_s, self.ended_all_s(action.mini_batch) + self.sums_s)
                begin_s, m = self.free_s[self.flow.device_of[action.stage]], self.staleness.last_of(action.mini_batch)
                yield max(begin_s, summed_s), 0, m, action
            else:
                yield self.begin_s(action), 1 if action.is_backward else 2, action.micro_batch, action

    def lasts_s(self, action: StageAction) -> float:
        """All but the last stages compute their forward again in backward."""
        if isinstance(action, AsyncUpdate):
            return self.update_s[action.stage]
        again = action.is_backward and action.stage in self.recomputed
        return super().lasts_s(action) + (self.took_s[action.stage].forward_s if again else 0.0)

    def sums_seconds(self) -> float:
        """Seconds to add up the gradients of shared parameters, one parameter after the other, and the norm."""
        total = 0.0
        for rows in self.flow.interface.groups.values():
            _, stage, name = rows[0]
            params = self.flow.interface.stages[stage].params if stage else ()
            devices = list(dict.fromkeys(device for device, _, _ in rows))
            part_bytes = sum(p.grad_bytes for p in params if p.name == name) / len(devices)
            ring = [(a, b) for a, b in zip(devices, devices[1:] + devices[:1]) if a != b]
            hop_s = max((self.messages.seconds(a, b, part_bytes) for a, b in ring), default=0.0)
            total += 2 * (len(devices) - 1) * hop_s
        return total

    def lanes_seconds(self, spec: StageSpec, draft: Draft) -> float:
        """Seconds to add up a stage's gradients over lanes."""
        lanes, role = draft.mesh.lanes, self.flow.device_of[spec.name]
        if len(lanes) < 2:
            return 0.0
        first, second = (draft.machine.devices[lane[role]].name for lane in lanes[:2])
        hop_s = spec.grad_bytes / len(lanes) / draft.machine.bandwidth(first, second)
        return 2 * (len(lanes) - 1) * (hop_s + draft.machine.latency_s(first, second))

    def update_seconds(self, spec: StageSpec, draft: Draft) -> float:
        """Seconds of a stage's update where its weights are, by the bytes that it moves."""
        device = draft.lane_hardware.devices[self.flow.device_of[spec.name]]
        num_bytes = ops.update_traffic(spec.trained_params, self.flow.interface.state_bytes(spec))
        return num_bytes / device.memory_bandwidth + len(spec.params) * device.op_overhead_s

    def ended_all_s(self, mini_batch: int) -> float:
        """The seconds at which a mini-batch has gradients from all stages that wait for each other."""
        last = self.staleness.last_of(mini_batch)
        return max(self.ended_s.get(Turn(stage, last, True), math.inf) for stage in self.late)

    def waits_s(self, turn: Turn) -> list[float]:
        return (self.backward_waits_s(turn) if turn.is_backward else self.forward_waits_s(turn)) + super().waits_s(turn)

    def forward_waits_s(self, turn: Turn) -> list[float]:
        """A stage without a backward waits, too: it runs no further ahead than a stage with one."""
        closing = self.flow.closing[turn.stage]
        before = turn.micro_batch - self.staleness.distance[turn.stage] - 1
        if turn.stage in self.flow.trained or closing is None or before < 0:
            return []
        return [0.0 if Turn(closing, before, True) in self.ended_s else math.inf]

    def backward_waits_s(self, turn: Turn) -> list[float]:
        """A backward waits for those of later stages on its device that read the same value: its gradient leaves after
        the first stage's backward."""
        spec, here = self.flow.interface.stages[turn.stage], self.flow.device_of[turn.stage]
        later = {
            reader
            for value in spec.inputs
            for reader in self.flow.learners[value.name]
            if self.flow.device_of[reader] == here and self.flow.place[reader] > self.flow.place[spec.name]
        }
        return [self.ended_s.get(Turn(reader, turn.micro_batch, True), math.inf) for reader in later]

    def do(self, action: StageAction, begin_s: float) -> None:
        super().do(action, begin_s)
        self.todo[action.stage].popleft()
        ends = isinstance(action, Turn) and action.is_backward and self.staleness.ends(action.micro_batch)
        if isinstance(action, Turn) and ends and action.stage in self.sharing[self.flow.device_of[action.stage]]:
            self.share(action.micro_batch // self.staleness.accumulate)
        if isinstance(action, Turn) and not action.is_backward and not self.staleness.distance[action.stage]:
            self.together(action)

    def share(self, mini_batch: int) -> None:
        """Add the sum of shared gradients, and the norm of all, after the last backward of the stages that wait for
        them. A norm is taken by all devices together."""
        end_s, all_of_them = self.ended_all_s(mini_batch), bool(self.staleness.clipped)
        if end_s < math.inf:
            rows = [(device, stages) for device, stages in self.sharing.items() if stages or all_of_them]
            self.ends += [(end_s, (device, Share(stages, mini_batch))) for device, stages in rows]

    def together(self, turn: Turn) -> None:
        """The last stage's backward follows its forward at once."""
        following = self.todo[turn.stage][0] if self.todo[turn.stage] else None
        if following == Turn(turn.stage, turn.micro_batch, True):
            begin_s = self.begin_s(following)
            if begin_s < math.inf:
                self.do(following, begin_s)
