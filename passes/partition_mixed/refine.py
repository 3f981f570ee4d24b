"""Mixed-pipe, step 3: blocks change to a neighbouring stage (FTPipe 4.1.3).

In: stages in topological order on their devices, and units that move as one: first the clusters of step 1, then single
blocks. Out: the same stages with other members. A unit moves to a stage it is connected to if that evens out the load
of the two devices, or lowers communication without making the slowest device slower; memory must hold it, the order of
stages must stay topological, and what it leaves must stay connected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .estimate import Wires
from .graph import BlockGraph
from .memory import Footprints, StageMemory

PASSES = 4  # the most passes over all units of a level
WORTH_WHILE = 1e-4  # the least gain of a move, as a share of a device's mean load


class Refinement:
    """`members`: blocks of each stage, `device_of`: its device. Both in topological order of the stages."""

    def __init__(
        self,
        graph: BlockGraph,
        members: Sequence[Sequence[int]],
        device_of: Sequence[int],
        memory: Footprints,
        wires: Wires,
        swapped: bool,
    ):
        self.graph, self.memory, self.wires, self.swapped = graph, memory, wires, swapped
        self.members = [set(own) for own in members]
        self.device_of = list(device_of)
        self.held: dict[int, StageMemory] = {}  # of stages with their members of now
        self.home = [0] * graph.num_blocks
        for stage, own in enumerate(self.members):
            for block in own:
                self.home[block] = stage
        near = self.graph.neighbours  # the blocks that may have a neighbour in another stage; all others stay
        self.border = {i for i, home in enumerate(self.home) if any([self.home[j] != home for j in near[i]])}
        self.busy_ns = [0] * len(graph.load_ns)
        for block, stage in enumerate(self.home):
            device = self.device_of[stage]
            self.busy_ns[device] += graph.load_ns[device][block]
        self.weight = 1 / len(self.busy_ns)  # devices' links work side by side
        self.least_ns = WORTH_WHILE * sum(self.busy_ns) / len(self.busy_ns)

    def run(self, units: Sequence[Sequence[int]]) -> None:
        """Move units until a pass over all of them moves none. Units whose blocks are in several stages stay."""
        for _ in range(PASSES):
            if not any([self.move(unit) for unit in units if not self.border.isdisjoint(unit)]):
                break

    def stages(self) -> tuple[list[list[int]], list[int]]:
        """Members and devices of the stages that are left."""
        kept = [s for s, own in enumerate(self.members) if own]
        return [sorted(self.members[s]) for s in kept], [self.device_of[s] for s in kept]

    def move(self, unit: Sequence[int]) -> bool:
        """Move a unit to the neighbouring stage with the largest gain, if any stage gains."""
        home, source, inside = self.home, self.home[unit[0]], set(unit)
        if any([home[block] != source for block in unit]):
            return False
        before = {home[a] for block in unit for a in self.graph.pred[block] if a not in inside}
        following = {home[b] for block in unit for b in self.graph.succ[block] if b not in inside}
        earliest, latest = max(before, default=0), min(following, default=len(self.members) - 1)
        gains = [
            (gain, stage)
            for stage in sorted(before | following)
            if stage != source and earliest <= stage <= latest and (gain := self.gain_ns(unit, stage)) > self.least_ns
        ]
        for _, stage in sorted(gains, reverse=True):
            if self._keeps_connection(source, inside) and self._fits(unit, source, stage):
                self._place(unit, stage)
                return True
        return False

    def gain_ns(self, unit: Sequence[int], stage: int) -> float:
        """By how much the busier of both devices, and communication, get shorter; 0 if one gets above the busiest."""
        source = self.home[unit[0]]
        a, b = self.device_of[source], self.device_of[stage]
        if a == b:
            return 0.0
        less_ns = sum(self.graph.load_ns[a][block] for block in unit)
        more_ns = sum(self.graph.load_ns[b][block] for block in unit)
        after_ns = max(self.busy_ns[a] - less_ns, self.busy_ns[b] + more_ns)
        if after_ns > max(self.busy_ns):
            return 0.0
        touched = {k for block in unit for k in (*self.graph.read[block], *self.graph.made[block])}
        before = sum(self._sending_ns(k) for k in touched)
        for block in unit:
            self.home[block] = stage
        after = sum(self._sending_ns(k) for k in touched)
        for block in unit:
            self.home[block] = source
        return max(self.busy_ns[a], self.busy_ns[b]) - after_ns + self.weight * (before - after)

    def _sending_ns(self, k: int) -> float:
        value = self.graph.values[k]
        maker = self.device_of[self.home[value.maker]]
        rates = self.wires.ns_per_byte[maker]
        readers = {self.device_of[self.home[reader]] for reader in value.readers}
        return sum(rates[d] for d in readers) * value.bytes * (1 + value.has_gradient)

    def _keeps_connection(self, stage: int, leaving: set[int]) -> bool:
        """Whether a stage, all of whose blocks are connected, is so without some: each part that it fell into would
        have a neighbour of what leaves."""
        rest, near = self.members[stage] - leaving, self.graph.neighbours
        wanted = set().union(*[near[block] for block in leaving]) & rest
        waiting = deque([wanted.pop()] if wanted else [])
        found = set(waiting)
        while waiting and wanted:
            new = (near[waiting.popleft()] & rest) - found
            found |= new
            wanted -= new
            waiting += new
        return not wanted

    def _fits(self, unit: Sequence[int], source: int, stage: int) -> bool:
        """Whether the devices of both stages hold what they then have: first the device that gets the unit."""
        changed = {stage: self.members[stage].union(unit), source: self.members[source].difference(unit)}
        for device in (self.device_of[stage], self.device_of[source]):
            held = [
                self.memory.stage(sorted(changed[s])) if s in changed else self._memory_of(s)
                for s, home in enumerate(self.device_of)
                if home == device and changed.get(s, self.members[s])
            ]
            if not self.memory.fits(device, held, self.swapped):
                return False
        return True

    def _memory_of(self, stage: int) -> StageMemory:
        if stage not in self.held:
            self.held[stage] = self.memory.stage(sorted(self.members[stage]))
        return self.held[stage]

    def _place(self, unit: Sequence[int], stage: int) -> None:
        source = self.home[unit[0]]
        a, b = self.device_of[source], self.device_of[stage]
        self.members[source].difference_update(unit)
        self.members[stage].update(unit)
        self.held.pop(source, None)
        self.held.pop(stage, None)
        for block in unit:
            self.home[block] = stage
            self.border |= self.graph.neighbours[block]
            self.busy_ns[a] -= self.graph.load_ns[a][block]
            self.busy_ns[b] += self.graph.load_ns[b][block]
