"""`partition-mixed`: stages out of any blocks, several of them on each device (FTPipe 4.1, Mixed-pipe).

In: blocks with costs, best single operators (`coarsen{level=operator}`). Out: stages that are connected and convex, in
topological order, and the device of each. Three steps, each in a file of its own: coarsening to L clusters
(`coarsen`), longest processing time first under every device's memory (`balance`), and refinement on
un-coarsened blocks (`refine`). L is tried at N, 2N, 3N, 4N and 6N for N devices, with several centers each: fill
and drain gains from more stages than the paper's asynchronous schedule, which L = 2N suits best.

The paper minimises the longest period of a device, with T_i of the stages on it and C_i = forward + backward,

    T_max = max_d sum_i T_i,    T_i = C_i + max(0, comm_fwd_i - C_i) + max(0, comm_bwd_i - C_i)              (eq. 1)

which a step of many micro-batches tends to. Here the attempts compete by the whole step, filling and draining included
(`estimate`); of equals, the one with the fewest bytes between devices wins, then the least depth. A device keeps all of
its stages resident where that is possible; stages are swapped only if no attempt fits otherwise.

For an asynchronous pipeline (`asynchronous`) the attempts do compete by T_max; of those within a hundredth the one of
least depth wins, as depth is staleness, and no stage is swapped. All stages but the last compute their forward again,
which is not known before the partition is: as in the paper (4.3) blocks are balanced again with the profiles that the
last partition showed to be right, until the last stage no longer changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import numpy as np

from ...ir.errors import DoesNotFit
from ...ir.units import format_bytes, format_seconds
from ..draft import Draft
from ..partition.partition import Partition, StagesDecision, asked_stages
from .balance import earliest_end, exchange, longest_first, merge_components
from .coarsen import Limits, evenly_by_both, evenly_by_load, heaviest, merge_around_centers, merge_by_type, merge_small
from .estimate import PipelineEstimate, Wires
from .graph import NANO, BlockGraph, Clusters, block_graph
from .memory import Footprints
from .refine import Refinement

CENTERS = (heaviest, evenly_by_load, evenly_by_both)
GRAINS = (0.5, 1, 2)  # clusters of one type take at most a stage's load divided by this
SLACK = 2  # clusters may take this many times the memory of a mean stage
ROUNDS = (1, 2, 3, 4, 6)  # L over the number of devices
FINER = (8, 12)  # L over the number of devices where none of `ROUNDS` fits
FRESHER = (1, 2, 3)  # the same for asynchronous pipelines, where stages cost staleness
PROFILES = 4  # the most times that an asynchronous pipeline is balanced
REFINED = 3  # attempts of each L that go on to the costly steps


@dataclass(frozen=True)
class PartitionMixed(Partition):
    """`stages`: L, the number of clusters made into stages; 0 tries several multiples of the number of devices.
    Connected clusters of one device become one stage, so there may be fewer. `asynchronous`: for `schedule-async`."""

    name: ClassVar[str] = "partition-mixed"
    rank: ClassVar[int] = 37
    slow: ClassVar[bool] = True
    stages: int = 0
    asynchronous: bool = False

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where no attempt fits, naming a block that is larger than any device if there is one."""
        num_devices = draft.lane_hardware.num_devices
        asked = asked_stages(draft, self.stages)
        counts = [asked] if asked else [k * num_devices for k in (FRESHER if self.asynchronous else ROUNDS)]
        counts = sorted({min(count, len(draft.blocks)) for count in counts})
        problem = _Problem.from_draft(draft, self.asynchronous)
        if problem.has_too_large_block():
            raise problem.does_not_fit(counts)
        if self.asynchronous:
            found = problem.best_asynchronous(counts)
        else:
            found = problem.best(counts, swapped=False) or problem.best(counts, swapped=True)
        if found is None and not asked and not self.asynchronous:  # smaller stages, so that any two of them fit
            found = problem.best([min(n * num_devices, len(draft.blocks)) for n in FINER], swapped=True)
        if found is None:
            raise problem.does_not_fit(counts)
        draft.notes[self.name] = found.remark(f" of {', '.join(map(str, counts))}" if len(counts) > 1 else "")
        names = [block.name for block in draft.blocks]
        return {"stages": [[names[i] for i in own] for own in found.members], "planned_for": found.device_of}


@dataclass(frozen=True)
class _Attempt:
    """A whole partition with its devices, and what it is worth."""

    count: int  # L
    members: list[list[int]]
    device_of: list[int]
    swapped: bool
    step_ns: int
    loads_ns: list[int]
    cut_bytes: int
    depth: int
    asynchronous: bool = False
    fits: bool = True

    @property
    def rank(self) -> tuple[int, int, int]:
        if self.asynchronous:
            return 100 * len(self.loads_ns) * self.step_ns // sum(self.loads_ns), self.depth, self.step_ns
        return self.step_ns, self.cut_bytes, self.depth

    def remark(self, tried: str) -> str:
        mean_ns = sum(self.loads_ns) / len(self.loads_ns)
        return (
            f"L={self.count}{tried}, {len(self.members)} stages of depth {self.depth}; "
            f"busiest device {max(self.loads_ns) / mean_ns:.3f} of the mean, {format_bytes(self.cut_bytes)} between "
            f"devices per micro-batch, {'one micro-batch' if self.asynchronous else 'step'} estimated "
            f"{format_seconds(self.step_ns / NANO)}" + ("; stages are swapped" if self.swapped else "")
        )


@dataclass
class _Problem:
    """A draft as integers, and the search on it. `light`: the blocks of an `asynchronous` pipeline that are assumed not
    to be computed again."""

    draft: Draft
    graph: BlockGraph
    memory: Footprints
    wires: Wires
    asynchronous: bool = False
    light: frozenset[int] = frozenset()

    @classmethod
    def from_draft(cls, draft: Draft, asynchronous: bool = False) -> _Problem:
        graph = block_graph(draft.blocks, draft.lane_hardware, draft.options.precision, draft.graph)
        return cls(draft, graph, Footprints(draft, graph), Wires.from_hardware(draft.lane_hardware), asynchronous)

    def best_asynchronous(self, counts: list[int]) -> _Attempt | None:
        """The best over all rounds of balancing, each with the profiles that the one before showed to be right."""
        found: list[_Attempt] = []
        for _ in range(PROFILES):
            attempt = self.best(counts, swapped=False)
            if attempt is None:
                break
            found.append(attempt)
            last = frozenset(attempt.members[-1])
            if last == self.light:
                break
            self.light = last
        return min(found, key=lambda a: a.rank, default=None)

    @property
    def assumed_graph(self) -> BlockGraph:
        """The graph with the profiles by which stages are balanced."""
        rows = zip(self.graph.load_ns, self.graph.forward_ns)
        loads = [
            [load - forwards[i] * (i in self.light) for i, load in enumerate(own)] for own, forwards in rows
        ]  # fmt: skip
        return replace(self.graph, load_ns=loads) if self.light else self.graph

    def best(self, counts: list[int], swapped: bool) -> _Attempt | None:
        """The best attempt over these L; None if none fits."""
        if not swapped and self.memory.least_resident_bytes > sum(self.memory.budgets):
            return None
        attempts = [a for count in counts for a in self.attempts(count, swapped) if a.fits]
        return min(attempts, key=lambda a: a.rank, default=None)

    def attempts(self, count: int, swapped: bool) -> Iterator[_Attempt]:
        """The most promising attempts for one L, refined."""
        started: list[tuple[int, list[int], Clusters, list[list[int]]]] = []
        small = self.merge_small(count, swapped)
        for grain in GRAINS:
            coarse = self.coarsen(small.copy(), count, grain, swapped)
            units = [sorted(own) for own in coarse.members.values()]
            for centers in CENTERS:
                clusters = coarse.copy()
                merge_around_centers(clusters, self.graph, count, centers, self.limits(count, swapped))
                flow = self.flow(clusters)
                self.count_under_way(flow, clusters)
                found = self.starts(flow, clusters, swapped)
                for devices, step_ns in zip(found, flow.steps_ns(np.array(found)).tolist() if found else ()):
                    started.append((step_ns, devices, clusters, units))
        started.sort(key=lambda row: row[0])
        seen: set[int] = set()
        for step_ns, devices, clusters, units in started:
            if step_ns not in seen and len(seen) < REFINED:
                seen.add(step_ns)
                yield self.finish(count, clusters.copy(), devices, units, swapped)

    def merge_small(self, count: int, swapped: bool) -> Clusters:
        """Clusters of blocks that are too small to be stages, and single blocks."""
        clusters = Clusters(self.graph.succ, self.largest_loads, self.block_bytes(swapped))
        merge_small(clusters, self.graph, self.limits(count, swapped))
        return clusters

    def coarsen(self, clusters: Clusters, count: int, grain: float, swapped: bool) -> Clusters:
        """Clusters of blocks of one type."""
        most_ns = sum(self.largest_loads) / (grain * count)
        merge_by_type(clusters, self.graph, count, most_ns, self.limits(count, swapped))
        return clusters

    @property
    def largest_loads(self) -> list[int]:
        """Per block the load on the device where it takes longest."""
        loads: list[int] = self.assumed_graph.times_ns[1].max(axis=0).tolist()
        return loads

    def limits(self, count: int, swapped: bool) -> Limits:
        """Limits so that several stages fit a device. A swapped stage shares its device with the next one's weights."""
        most = max(self.memory.budgets) // (2 if swapped else 1)
        sizes = self.block_bytes(swapped)
        return Limits(min(most, max(max(sizes), SLACK * sum(sizes) // count)), self.wires.slowest_ns_per_byte)

    def block_bytes(self, swapped: bool) -> list[int]:
        """Bytes that each block adds to its device for good: swapped weights come without optimizer states."""
        if not swapped:
            return self.memory.alone_bytes
        return [sum(weight for weight, _ in row.values()) for row in self.memory.parameters]

    def flow(self, clusters: Clusters) -> PipelineEstimate:
        return self._flow([clusters.members[c] for c in clusters.list_in_order()], ())

    def _flow(self, members: list[list[int]], spared: Sequence[bool]) -> PipelineEstimate:
        few = 2 * self.draft.lane_hardware.num_devices  # more micro-batches only repeat what these show
        count = min(self.draft.options.micro_batches, few)
        return PipelineEstimate(self.graph, members, self.wires, count, spared, asynchronous=self.asynchronous)

    def count_under_way(self, flow: PipelineEstimate, clusters: Clusters) -> None:
        """Have memory count the micro-batches that are under way in an asynchronous pipeline of these stages."""
        if self.asynchronous:
            self.memory.count_under_way([clusters.members[c] for c in clusters.list_in_order()], flow.distances())

    def starts(self, flow: PipelineEstimate, clusters: Clusters, swapped: bool) -> list[list[int]]:
        needs = [self.memory.stage(clusters.members[c]) for c in clusters.list_in_order()]
        found = (
            longest_first(flow.load_ns, needs, self.memory, swapped, by_bytes=False),
            longest_first(flow.load_ns, needs, self.memory, swapped, by_bytes=True),
            earliest_end(flow, needs, self.memory, swapped),
        )
        return [devices for devices in found if devices is not None]

    def finish(
        self, count: int, clusters: Clusters, devices: list[int], units: list[list[int]], swapped: bool
    ) -> _Attempt:
        """Exchange devices, make connected clusters stages, and refine, which counts only where it helps."""
        order, flow = clusters.list_in_order(), self.flow(clusters)
        self.count_under_way(flow, clusters)
        needs = [self.memory.stage(clusters.members[c]) for c in order]
        devices = exchange(flow, devices, needs, self.memory, swapped)
        device_of = dict(zip(order, devices))
        merge_components(clusters, device_of, self.graph, self.memory, swapped)
        if self.asynchronous:
            self.count_under_way(self.flow(clusters), clusters)
        members = [sorted(clusters.members[c]) for c in clusters.list_in_order()]
        devices = [device_of[c] for c in clusters.list_in_order()]
        plain = self.value(count, members, devices, swapped)
        refinement = Refinement(self.assumed_graph, members, devices, self.memory, self.wires, swapped)
        refinement.run(units)
        refinement.run([[block] for block in range(self.graph.num_blocks)])
        refined = self.value(count, *refinement.stages(), swapped)
        return min(plain, refined, key=lambda a: (not a.fits, a.rank))

    def value(self, count: int, members: list[list[int]], devices: list[int], swapped: bool) -> _Attempt:
        spared = [False] * len(members)
        for device in set() if swapped else set(devices):
            own = [s for s, home in enumerate(devices) if home == device]
            found = self.memory.may_keep(device, [self.memory.stage(members[s]) for s in own])
            for s, is_spared in zip(own, found):
                spared[s] = is_spared
        flow, fits = self._flow(members, spared), True
        if self.asynchronous:  # as exactly as it is known
            self.memory.count_under_way(members, flow.distances())
            needs = [(home, self.memory.stage(own)) for own, home in zip(members, devices)]
            fits = all(self.memory.fits(d, [s for home, s in needs if home == d], swapped) for d in set(devices))
        loads = flow.device_load_ns(devices, self.draft.lane_hardware.num_devices)
        return _Attempt(
            count,
            members,
            devices,
            swapped,
            flow.step_ns(devices),
            loads,
            flow.cut_bytes(devices),
            flow.depth(),
            self.asynchronous,
            fits,
        )

    def has_too_large_block(self) -> bool:
        """Whether a block alone needs more than any device has."""
        most, memory = max(self.memory.budgets), self.memory
        return any(memory.most_alone_bytes(i) > most for i in range(self.graph.num_blocks)) and self.largest[0] > most

    @cached_property
    def largest(self) -> tuple[int, str]:
        """The block that needs most memory alone: its bytes and its name. In an asynchronous pipeline the inputs of one
        micro-batch count, as no fewer are under way whatever the stages."""
        before = self.memory.distance
        if self.asynchronous:
            self.memory.count_under_way([range(self.graph.num_blocks)], [0])
        needs = [self.memory.swapped_bytes([self.memory.stage([i])]) for i in range(self.graph.num_blocks)]
        self.memory.distance = before
        return max(zip(needs, (block.name for block in self.draft.blocks)))

    def does_not_fit(self, counts: list[int]) -> DoesNotFit:
        (need, name), budget = self.largest, max(self.memory.budgets)
        if need > budget:
            return DoesNotFit(
                f"block {name!r} alone needs {format_bytes(need)} on a device; the largest has {format_bytes(budget)}, "
                f"missing {format_bytes(need - budget)}. Nearest that fits: devices of {format_bytes(need)}, or more "
                f"micro_batches (now {self.memory.micro_batches}), which are smaller",
                memory="device",
                missing_bytes=need - budget,
            )
        return DoesNotFit(
            f"no mixed partition into {', '.join(map(str, counts))} stages fits the devices' memories; the largest "
            f"block alone needs {format_bytes(need)} of {format_bytes(budget)}. Nearest that fits: more micro_batches "
            f"(now {self.memory.micro_batches}), which are smaller, more stages, or devices with more memory",
            memory="device",
        )
