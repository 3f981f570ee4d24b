"""`map-cross`: stages that follow each other go to devices under different root complexes (Mobius 3.3, eq. 12, 13).

In: stages, each cut for a device. Out: `draft.devices`. With `shared(i, j)` the number of devices under the root
complex that runs both stage i and stage j, and 0 where no complex runs both, the mapping minimises

    sum over i < j of contention(i, j),    contention(i, j) = shared(i, j) / |i - j|          (eq. 12, 13)

The contention of the stages of two devices p and q depends on one number, `A[p][q] = sum 1 / |i - j|` over the stages i
of p and j of q, so the search only chooses a root complex per device. It goes depth first with bounds, takes equal
complexes that are still empty once, begins from the most even interleaving, and ends at a deadline.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...ir.machine.hardware import Hardware
from ..draft import Draft
from ..work_limit import WorkDone
from .mapping import Mapping, equal_devices

Complex = tuple[int, int]  # host, root complex
DEADLINE_S = 1.0
PLACED_S = 5e-7  # of work, for a device whose distance to one that is placed changes


@dataclass(frozen=True)
class MapCross(Mapping):
    """`deadline_s`: seconds of work (`passes/work_limit.py`) after which the best mapping found so far is taken."""

    name: ClassVar[str] = "map-cross"
    rank: ClassVar[int] = 42
    deadline_s: float = DEADLINE_S

    def plan(self, draft: Draft) -> list[int]:
        search = _Search(draft.lane_hardware, draft.planned_for, equal_devices(draft.lane_hardware), self.deadline_s)
        place = search.run()
        if not search.proven:
            draft.notes[self.name] = f"the best mapping found in {self.deadline_s:g} s; there may be a better one"
        return [place[device] for device in draft.planned_for]


def cross_order(hardware: Hardware, num_stages: int, deadline_s: float = DEADLINE_S) -> list[int]:
    """Devices in the order with the least contention when stage j of `num_stages` runs on `order[j mod N]`.

    For partitioners, which cut each stage for its device afterwards, so any two devices of one host may be exchanged.
    """
    hosts: dict[int, list[int]] = defaultdict(list)
    for index, device in enumerate(hardware.devices):
        hosts[device.host].append(index)
    planned = [j % hardware.num_devices for j in range(num_stages)]
    place = _Search(hardware, planned, list(hosts.values()), deadline_s).run()
    return [place[p] for p in range(hardware.num_devices)]


def complexes(hardware: Hardware) -> list[Complex]:
    """The root complex of each device."""
    return [(device.host, device.root_complex) for device in hardware.devices]


class _Search:
    """Searches which device takes the part of each planned one. Devices are exchanged inside `groups` only."""

    def __init__(self, hardware: Hardware, planned: Sequence[int], groups: list[list[int]], deadline_s: float):
        self.homes = complexes(hardware)
        self.shared = Counter(self.homes)
        self.rooms = list(self.shared)
        self.group_of = {device: g for g, group in enumerate(groups) for device in group}
        self.weight = _weights(planned, hardware.num_devices)
        self.parts = list(dict.fromkeys([*planned, *range(hardware.num_devices)]))  # in order of their first stage
        self.capacity = {room: [0] * len(groups) for room in self.rooms}
        for device, room in enumerate(self.homes):
            self.capacity[room][self.group_of[device]] += 1
        self.free = {room: list(slots) for room, slots in self.capacity.items()}
        self.near = [dict.fromkeys(self.rooms, 0.0) for _ in self.homes]  # contention with what is placed already
        self.chosen: dict[int, Complex] = {}
        self.pairs: dict[tuple[int, ...], float] = {}
        self.most_s, self.work = deadline_s, WorkDone()
        self.proven = True

    def run(self) -> dict[int, int]:
        """The device in place of each planned one, which is itself where no exchange helps."""
        own = dict(enumerate(self.homes))
        even = self._interleave()
        self.best = own if self._cost(own) <= self._cost(even) else even
        self.best_cost = self._cost(self.best)
        if len(self.rooms) > 1:
            self._place(0, 0.0)
        return self._devices(self.best) if self.best is not own else {d: d for d in own}

    def _place(self, depth: int, cost: float) -> None:
        if cost + self._bound(depth) >= self.best_cost * (1 - 1e-9):
            return
        if depth == len(self.parts):
            self.best, self.best_cost = dict(self.chosen), cost
            return
        part = self.parts[depth]
        group, near = self.group_of[part], self.near[part]
        own = self.weight[part][part]
        for room in sorted(self._distinct(group), key=lambda r: near[r] + own * self.shared[r]):
            if self.work.seconds > self.most_s:
                self.proven = False
                return
            self._put(depth, room, 1)
            self._place(depth + 1, cost + near[room] + own * self.shared[room])
            self._put(depth, room, -1)

    def _put(self, depth: int, room: Complex, sign: int) -> None:
        part = self.parts[depth]
        self.work.add(PLACED_S * len(self.parts))
        self.chosen[part] = room
        self.free[room][self.group_of[part]] -= sign
        for other in self.parts[depth + 1 :]:
            self.near[other][room] += sign * self.shared[room] * self.weight[part][other]

    def _distinct(self, group: int) -> list[Complex]:
        """Complexes with room for a device of the group; of those that are empty and alike, only the first."""
        found: dict[object, Complex] = {}
        for room in self.rooms:
            if self.free[room][group]:
                is_empty = self.free[room] == self.capacity[room]
                found.setdefault((self.shared[room], *self.free[room]) if is_empty else room, room)
        return list(found.values())

    def _bound(self, depth: int) -> float:
        """A lower bound of the contention that the unplaced parts add: at best with the placed ones, and at least among
        themselves."""
        total = 0.0
        for part in self.parts[depth:]:
            group, near, own = self.group_of[part], self.near[part], self.weight[part][part]
            total += min(near[r] + own * self.shared[r] for r in self.rooms if self.free[r][group])
        left = (depth, *(sum(self.free[room]) for room in self.rooms))
        if left not in self.pairs:
            self.pairs[left] = self._least_pairs(depth, left[1:])
        return total + self.pairs[left]

    def _least_pairs(self, depth: int, left: Sequence[int]) -> float:
        """The least contention of unplaced pairs, whose number per complex is known: crowded ones get the farthest."""
        rest = self.parts[depth:]
        far = sorted(self.weight[a][b] for i, a in enumerate(rest) for b in rest[:i])
        crowds = [self.shared[room] for room, n in zip(self.rooms, left) for _ in range(n * (n - 1) // 2)]
        return float(sum(a * b for a, b in zip(far, sorted(crowds, reverse=True))))

    def _cost(self, chosen: dict[int, Complex]) -> float:
        parts = self.parts
        pairs = ((a, b) for i, a in enumerate(parts) for b in parts[: i + 1] if chosen[a] == chosen[b])
        return float(sum(self.shared[chosen[a]] * self.weight[a][b] for a, b in pairs))

    def _interleave(self) -> dict[int, Complex]:
        """Each complex's devices spread evenly over the parts of their group."""
        chosen: dict[int, Complex] = {}
        for group in set(self.group_of.values()):
            slots = [(i + 0.5) / n[group] for n in self.capacity.values() for i in range(n[group])]
            rooms = [room for room, n in self.capacity.items() for _ in range(n[group])]
            spread = [room for _, room in sorted(zip(slots, rooms))]
            chosen.update(zip((p for p in self.parts if self.group_of[p] == group), spread))
        return chosen

    def _devices(self, chosen: dict[int, Complex]) -> dict[int, int]:
        """The device of each part: inside a complex and a group the devices come in turn."""
        waiting: dict[tuple[int, Complex], list[int]] = defaultdict(list)
        for device, room in enumerate(self.homes):
            waiting[self.group_of[device], room].append(device)
        return {part: waiting[self.group_of[part], chosen[part]].pop(0) for part in self.parts}


def _weights(planned: Sequence[int], count: int) -> list[list[float]]:
    """A[p][q]: the sum of 1 / |i - j| over stages i of p and j of q; on the diagonal each pair of stages once."""
    weight = [[0.0] * count for _ in range(count)]
    for j, q in enumerate(planned):
        for i in range(j):
            p = planned[i]
            weight[p][q] += 1 / (j - i)
            if p != q:
                weight[q][p] += 1 / (j - i)
    return weight
