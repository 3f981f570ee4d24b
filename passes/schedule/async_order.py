"""The order of an asynchronous pipeline: what each device does, one action after the other (FTPipe 4, work scheduling).

A stage at distance d from the end (the longest way over other stages) does d + 1 forwards, then backward and forward in
turn; after each backward it is updated with that micro-batch's gradients. So its forward of micro-batch k reads what
max(0, k - d) updates have made.

A parameter that several stages share has a copy in each, updated with the sum of all their gradients of a micro-batch.
With D the largest distance among such stages, one at distance d updates its copy with micro-batch k after its backward
of micro-batch k + D - d: by then the backward of k has had the time to reach the first of them, and the sum to come
back. So all of them run the forward of micro-batch k on version max(0, k - D) of what they share, and every copy is the
same at every version; a stage nearer to the end than D has its backward on version max(0, k - (D - d)) of that, and
holds the shared gradients, but no others, of D - d + 1 micro-batches.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

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
    """The number of updates between the weights of a forward and the update with its gradients, once that many
    micro-batches have passed: for a stage's own parameters its `distance` to the end, for those that stages share the
    largest distance of these. `shared`: stage -> trained parameters that it shares."""

    distance: Mapping[str, int]
    shared: Mapping[str, Collection[str]]

    @property
    def of_shared(self) -> int:
        return max((self.distance[name] for name in self.shared), default=0)

    def lag(self, stage: str) -> int:
        """The number of later backwards before a stage updates what it shares with a micro-batch's gradients."""
        return self.of_shared - self.distance[stage]

    def has_own(self, spec: StageSpec) -> bool:
        """Whether a stage trains parameters that it does not share."""
        return any(p.requires_grad and p.name not in self.shared.get(spec.name, ()) for p in spec.params)


def staleness_of(flow: Flow) -> Staleness:
    """The staleness of a flow's stages; the interface's groups are those of parameters that stages share."""
    shared: dict[str, set[str]] = defaultdict(set)
    for rows in flow.interface.groups.values():
        for _, stage, param in rows:
            shared[stage].add(param)
    return Staleness(distances(flow), shared)


def sequence(spec: StageSpec, flow: Flow, staleness: Staleness) -> list[StageAction]:
    """What one stage does, in order."""
    name, count, ahead = spec.name, flow.interface.micro_batches, staleness.distance[spec.name] + 1
    if name not in flow.trained:
        return [Turn(name, m) for m in range(count)]
    own = staleness.has_own(spec)
    lag, shared = (staleness.lag(name), range(count)) if name in staleness.shared else (0, range(0))
    steps: list[StageAction] = [Turn(name, m) for m in range(min(ahead, count))]
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


class Alternating(Timetable):
    """A pipeline under way: what each stage has still to do, and what has ended when. Of the actions that can begin
    first, updates go before backwards, these before forwards, and earlier micro-batches first."""

    def __init__(self, flow: Flow, draft: Draft):
        super().__init__(flow, draft)
        self.staleness = staleness_of(flow)
        self.recomputed = frozenset(recomputed(flow))
        self.todo = {spec.name: deque(sequence(spec, flow, self.staleness)) for spec in flow.specs}
        self.sharing = {d: tuple(s.name for s in flow.on(d) if s.name in self.staleness.shared) for d in flow.devices}

    def able(self) -> Iterator[Able]:
        """The next action of each stage."""
        for action in (actions[0] for actions in self.todo.values() if actions):
            if isinstance(action, AsyncUpdate):
                summed_s = self.summed_s(action.micro_batch) if action.is_shared else 0.0
                yield max(self.free_s[self.flow.device_of[action.stage]], summed_s), 0, action.micro_batch, action
            else:
                yield self.begin_s(action), 1 if action.is_backward else 2, action.micro_batch, action

    def lasts_s(self, action: StageAction) -> float:
        """All but the last stages compute their forward again in backward."""
        again = isinstance(action, Turn) and action.is_backward and action.stage in self.recomputed
        return super().lasts_s(action) + (self.took_s[action.stage].forward_s if again else 0.0)

    def summed_s(self, m: int) -> float:
        """When the gradients of a micro-batch are there from all stages that share parameters."""
        return max(self.ended_s.get(Turn(stage, m, True), math.inf) for stage in self.staleness.shared)

    def waits_s(self, turn: Turn) -> list[float]:
        return (self.before_backward(turn) if turn.is_backward else self.before_forward(turn)) + super().waits_s(turn)

    def before_forward(self, turn: Turn) -> list[float]:
        """A stage without a backward waits, too: it runs no further ahead than a stage with one."""
        closing = self.flow.closing[turn.stage]
        before = turn.micro_batch - self.staleness.distance[turn.stage] - 1
        if turn.stage in self.flow.trained or closing is None or before < 0:
            return []
        return [0.0 if Turn(closing, before, True) in self.ended_s else math.inf]

    def before_backward(self, turn: Turn) -> list[float]:
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
        if isinstance(action, Turn) and action.is_backward and action.stage in self.staleness.shared:
            self.share(action.micro_batch)
        if isinstance(action, Turn) and not action.is_backward and not self.staleness.distance[action.stage]:
            self.together(action)

    def share(self, m: int) -> None:
        """Add the sum of shared gradients after the last backward of the stages that share parameters."""
        end_s = self.summed_s(m)
        if end_s < math.inf:
            self.ends += [(end_s, (device, Share(stages, m))) for device, stages in self.sharing.items() if stages]

    def together(self, turn: Turn) -> None:
        """The last stage's backward follows its forward at once."""
        following = self.todo[turn.stage][0] if self.todo[turn.stage] else None
        if following == Turn(turn.stage, turn.micro_batch, True):
            begin_s = self.begin_s(following)
            if begin_s < math.inf:
                self.do(following, begin_s)
