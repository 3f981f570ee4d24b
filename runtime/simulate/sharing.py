"""The sharing of links between transfers that run at the same time: strict priority between classes, max-min fair
inside a class.

A resource is a link, or the medium that several simplex links take turns on. Its use, the sum over its flows of
rate / bandwidth, is at most 1. Rates are max-min fair when no flow can get more without taking from a flow that has
at most as much, each rate measured by its weight (1 for bytes between memories). A lower class gets what higher ones
leave.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from ...ir.machine.links import Link

Path = tuple[str, ...]
TOLERANCE = 1e-9  # the share of a resource below which a rest counts as a rounding error


def fair_rates(
    paths: Sequence[Path],
    links: Mapping[str, Link],
    priorities: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
) -> list[float]:
    """Bytes/s of each flow, one per path (or `counts` equal flows per path); lower priority numbers go first.

    A flow with an empty path has no limit (inf).
    """
    uses = [_uses(path, links) for path in paths]
    classes = priorities if priorities is not None else [0] * len(paths)
    numbers = counts or [1] * len(paths)
    weights = [math.prod(links[name].weight for name in path) for path in paths]
    left: dict[str, float] = {resource: 1.0 for use in uses for resource in use}
    rates = [math.inf if not use else 0.0 for use in uses]
    for wanted in sorted(set(classes)):
        waiting = {i for i, use in enumerate(uses) if use and classes[i] == wanted}
        _fill(waiting, uses, numbers, weights, left, rates)
    return rates


def _uses(path: Path, links: Mapping[str, Link]) -> dict[str, float]:
    """For each resource on the path, the part of it that one byte/s takes."""
    uses: dict[str, float] = {}
    for name in path:
        link = links[name]
        resource = link.simplex or name
        uses[resource] = uses.get(resource, 0.0) + 1.0 / link.bandwidth
    return uses


def _fill(
    waiting: set[int],
    uses: list[dict[str, float]],
    counts: Sequence[int],
    weights: Sequence[float],
    left: dict[str, float],
    rates: list[float],
) -> None:
    """Raise the rates of the waiting flows together, each by its weight; a flow stops where one of its resources is
    full."""
    while waiting:
        load: dict[str, float] = {}
        for i in waiting:
            for resource, part in uses[i].items():
                load[resource] = load.get(resource, 0.0) + counts[i] * weights[i] * part
        level, full = min((left[resource] / part, resource) for resource, part in load.items())
        for i in [i for i in waiting if full in uses[i]]:
            waiting.discard(i)
            rates[i] = level * weights[i]
            for resource, part in uses[i].items():
                rest = left[resource] - counts[i] * part * rates[i]
                left[resource] = rest if rest > TOLERANCE else 0.0


@dataclass(eq=False)
class FlowClass:
    """All running flows with one path and priority: they have one rate. `moved_bytes` is what each has moved so far."""

    path: Path
    priority: int
    resources: frozenset[str]
    number: int
    rate: float = 0.0
    moved_bytes: float = 0.0
    since_s: float = 0.0
    version: int = 0
    flows: list[tuple[float, int]] = field(default_factory=list)  # (moved_bytes at which it ends, flow)

    def advance(self, now_s: float) -> None:
        if now_s > self.since_s:
            self.moved_bytes += self.rate * (now_s - self.since_s)
            self.since_s = now_s

    def next_end_s(self) -> float:
        """The time when the first of its flows ends at the present rate."""
        left = min(self.flows)[0] - self.moved_bytes
        return self.since_s + max(0.0, left / self.rate) if self.rate > 0 else math.inf


class Traffic:
    """The flows that run now. Starting or ending a flow changes only the rates of flows that it shares links with."""

    def __init__(self, links: Mapping[str, Link]):
        self.links = links
        self.classes: dict[tuple[Path, int], FlowClass] = {}
        self.on: dict[str, set[FlowClass]] = {}  # per resource, the classes with flows on it
        self.solved: dict[tuple[tuple[int, int], ...], list[float]] = {}  # (group, flows) rows to the classes' rates

    def class_of(self, path: Path, priority: int) -> FlowClass:
        key = (path, priority)
        if key not in self.classes:
            resources = frozenset(self.links[name].simplex or name for name in path)
            self.classes[key] = FlowClass(path, priority, resources, len(self.classes))
        return self.classes[key]

    def start(self, group: FlowClass, flow: int, num_bytes: float, now_s: float) -> list[FlowClass]:
        """Begin a flow; returns the classes whose next end has changed."""
        group.advance(now_s)
        if not group.flows:
            group.moved_bytes, group.since_s = 0.0, now_s
            for resource in group.resources:
                self.on.setdefault(resource, set()).add(group)
        group.flows.append((group.moved_bytes + num_bytes, flow))
        return self.share(group, now_s)

    def end(self, group: FlowClass, now_s: float) -> tuple[int, list[FlowClass]]:
        """End the group's next flow; returns it and the classes whose next end has changed."""
        group.advance(now_s)
        row = min(group.flows)
        group.flows.remove(row)
        if not group.flows:
            for resource in group.resources:
                self.on[resource].discard(group)
        return row[1], self.share(group, now_s)

    def share(self, changed: FlowClass, now_s: float) -> list[FlowClass]:
        """Set the rates of all classes that share links with `changed`, directly or through other classes."""
        near = self.connected_classes(changed)
        key = tuple((group.number, len(group.flows)) for group in near)
        rates = self.solved.get(key)
        if rates is None:
            paths, counts = [group.path for group in near], [len(group.flows) for group in near]
            rates = self.solved[key] = fair_rates(paths, self.links, [group.priority for group in near], counts)
        moved = []
        for group, rate in zip(near, rates):
            if rate != group.rate or group is changed:
                group.advance(now_s)
                group.rate = rate
                moved.append(group)
        for group in moved:
            group.version += 1
        return moved

    def connected_classes(self, first: FlowClass) -> list[FlowClass]:
        """Lanes with flows that share a resource with `first` or with one found so far, in a fixed order."""
        found = {first}
        queue = [first]
        for group in queue:
            for resource in group.resources:
                for other in self.on.get(resource, ()):
                    if other not in found:
                        found.add(other)
                        queue.append(other)
        return sorted((group for group in found if group.flows), key=lambda group: group.number)


@dataclass(frozen=True)
class Cost:
    """The cost of a task: first `fixed_s` pass, next all `flows` (path, amount) run at the same time, and last comes
    the cost `then`."""

    fixed_s: float = 0.0
    flows: tuple[tuple[Path, float], ...] = ()
    priority: int = 0
    then: Cost | None = None

    def parts(self) -> Iterator[Cost]:
        """This cost and all that follow it by `then`, in order."""
        part: Cost | None = self
        while part is not None:
            yield part
            part = part.then


class TasksUnderWay:
    """Tasks under way, by number, and their next events. `moved` has the amount that has moved along each path.

    Time passes only as `pop` says, so that the same tasks take as long in a simulation as in real time.
    """

    def __init__(self, links: Mapping[str, Link]):
        self.traffic = Traffic(links)
        self.moved: dict[Path, float] = {}
        self.flows_left: dict[int, int] = {}
        self.costs: dict[int, Cost] = {}
        # (second, number of the event, task whose fixed time is over or group whose next flow ends, group's version)
        self.events: list[tuple[float, int, int | FlowClass, int]] = []
        self.count = 0

    def begin(self, task: int, cost: Cost, now_s: float) -> None:
        self.costs[task] = cost
        self._push(now_s + cost.fixed_s, task, 0)

    @property
    def next_s(self) -> float:
        """The second of the next event, which need not be the end of a task."""
        return self.events[0][0] if self.events else math.inf

    def pop(self) -> tuple[float, int | None]:
        """Let the next event happen; returns its second, and the task that it ends, if any."""
        now_s, _, what, version = heappop(self.events)
        if isinstance(what, int):
            return now_s, self._flow(what, now_s)
        if version != what.version:
            return now_s, None
        flow, changed = self.traffic.end(what, now_s)
        self._expect(changed)
        self.flows_left[flow] -= 1
        return now_s, None if self.flows_left[flow] else self._end_part(flow, now_s)

    def _flow(self, task: int, now_s: float) -> int | None:
        """Start a task's flows when its fixed time is over; without flows this part of the task is over."""
        cost = self.costs.pop(task)
        if cost.then is not None:
            self.costs[task] = cost.then
        self.flows_left[task] = len(cost.flows)
        for path, amount in cost.flows:
            self.moved[path] = self.moved.get(path, 0.0) + amount
            self._expect(self.traffic.start(self.traffic.class_of(path, cost.priority), task, amount, now_s))
        return None if cost.flows else self._end_part(task, now_s)

    def _end_part(self, task: int, now_s: float) -> int | None:
        """Begin the next part of a task when one is over; returns the task if that was its last part."""
        if task not in self.costs:
            return task
        self.begin(task, self.costs[task], now_s)
        return None

    def _expect(self, classes: Sequence[FlowClass]) -> None:
        for group in classes:
            if group.flows and group.rate > 0:
                self._push(group.next_end_s(), group, group.version)

    def _push(self, at_s: float, what: int | FlowClass, version: int) -> None:
        self.count += 1
        heappush(self.events, (at_s, self.count, what, version))


def alone_s(cost: Cost, links: Mapping[str, Link]) -> float:
    """Seconds of a task that has the machine to itself."""
    progress, ended = TasksUnderWay(links), None
    progress.begin(0, cost, 0.0)
    while ended is None:
        now_s, ended = progress.pop()
    return now_s
