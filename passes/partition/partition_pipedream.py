"""`partition-pipedream`: the contiguous stages whose slowest unit is fastest (PipeDream 3.1).

In: blocks with costs. Out: `draft.partition` and `draft.stages`. Dynamic programming over the devices in turn and the
cuts minimises the bottleneck of the pipeline,

    A(b, s) = min over a < b, p < s of max(A(a, p), c_a / B(p, s), T_s(a, b))

the time of the slowest of all stages and messages when blocks[:b] run on devices up to s: `T_s(a, b)` forward and
backward seconds of blocks[a:b] on device s, infinite where they do not fit its memory; `c_a` the bytes that cross the
cut at a and their gradients; `B(p, s)` the rate from device p to s. A device may be passed over, so that a slow one, or
a slow link, need not be used. Where a stage per device does not fit, each device gets 2, 3, ... turns.

With `replicas`, on equal devices, a stage may have r devices, which take its micro-batches in turn (`map-replicas`):

    A(b, k) = min over a < b, r <= k of max(A(a, k - r), c_a / B, T(a, b) / r + G_r(a, b))

with `G_r(a, b)` what a micro-batch bears of the sum of gradients over r devices, which comes once a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...ir.errors import PassError
from ..draft import Draft
from .fill import fewest_rounds
from .loads import Loads
from .partition import Partition, StagesDecision, asked_stages
from .slices import Slices

Route = list[tuple[int, int]]  # per stage: the turn of its device, and the block after its last one


@dataclass(frozen=True)
class PartitionPipedream(Partition):
    """`stages`: the number of stages, on the devices in turn; 0 leaves it to the search. `replicas`: stages are cut for
    several devices each."""

    name: ClassVar[str] = "partition-pipedream"
    rank: ClassVar[int] = 34
    stages: int = 0
    replicas: bool = False

    def check_pipeline(self, given: Collection[str]) -> None:
        if self.replicas and "copies" not in given:
            raise PassError(f"pass {self.name!r} cuts stages for several devices each; put map-replicas after it")
        if self.replicas and self.stages:
            raise PassError(f"pass {self.name!r}: with replicas=true it chooses the number of stages; leave stages out")

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where no contiguous stages fit, `PassError` for more stages than blocks."""
        count = draft.lane_hardware.num_devices
        if self.replicas:
            return self._plan_copies(draft)
        asked = asked_stages(draft, self.stages)
        search = _Search(draft)
        turns = asked or count * fewest_rounds(search.slices)
        route = search.route(turns, every=bool(asked))
        if route is None:
            raise search.slices.does_not_fit([turns])
        names = [block.name for block in draft.blocks]
        starts = [0, *(end for _, end in route)]
        return {
            "stages": [names[a:b] for a, (_, b) in zip(starts, route)],
            "planned_for": [turn % count for turn, _ in route],
        }

    def _plan_copies(self, draft: Draft) -> StagesDecision:
        if len(set(draft.lane_hardware.device_kinds)) > 1:
            raise PassError(f"{self.name}: replicas=true is for equal devices; use mesh{{by_speed=true}} on others")
        search = _Search(draft)
        rows = search.stages_with_copies(draft)
        if rows is None:
            raise search.slices.does_not_fit([draft.lane_hardware.num_devices])
        names, starts = [block.name for block in draft.blocks], [0, *(end for end, _ in rows)]
        firsts = [0, *itertools.accumulate(copies for _, copies in rows)]
        return {
            "stages": [names[a:b] for a, (b, _) in zip(starts, rows)],
            "planned_for": firsts[: len(rows)],
        }


class _Search:
    """The dynamic program. Rows of its arrays are cut positions a, columns b."""

    def __init__(self, draft: Draft):
        self.slices, self.loads = Slices(draft), Loads(draft)
        self.crossing = self.loads.crossing_bytes()
        self.sent_s: dict[tuple[int, int], np.ndarray] = {}
        self.count, size = draft.lane_hardware.num_devices, len(draft.blocks) + 1
        self.work, self.input = np.full((size, size), np.inf), np.zeros((size, size))
        for b, needs in enumerate(self.slices.needs):
            self.work[:b, b] = [need.work_bytes for need in needs]
            self.input[:b, b] = [need.input_bytes for need in needs]

    def route(self, turns: int, every: bool) -> Route | None:
        """The stages with the least bottleneck on the first `turns` turns; with `every` each turn has a stage."""
        last = len(self.crossing) - 1
        ends: list[np.ndarray] = []  # per turn and b: the bottleneck if this turn's stage ends at b
        origin: list[tuple[np.ndarray, np.ndarray]] = []  # the a of that stage per b, and the turn before it per a
        for turn in range(turns):
            entry, before = self._entry(ends, turn, range(turn - 1 if every else 0, turn), start=not every or turn == 0)
            through = np.maximum(entry[:, None], self._stage_s(turn, turns))
            origin.append((through.argmin(axis=0), before))
            ends.append(through.min(axis=0))
        final = [float(row[last]) for row in ends]
        turn = turns - 1 if every else int(np.argmin(final))
        if not np.isfinite(final[turn]):
            return None
        found, b = [], last
        while b > 0:
            found.append((turn, b))
            starts, before = origin[turn]
            b = int(starts[b])
            turn = int(before[b])
        return found[::-1]

    def stages_with_copies(self, draft: Draft) -> list[tuple[int, int]] | None:
        """The stages with the least bottleneck, each as the block after its last one and its number of devices."""
        size, micro_batches, count = len(self.crossing), self.slices.micro_batches, self.count
        bytes_to = np.array([0, *itertools.accumulate(block.param_bytes for block in draft.blocks)])
        sent_s = self._sent_s(0, 1) if count > 1 else np.zeros(size)
        byte_s = self.loads.message_s(0, 1, 1e9) / 1e9 if count > 1 else 0.0
        stage_s = []
        for copies in range(1, min(count, micro_batches) + 1):
            own = -(-micro_batches // copies)
            times = np.array(self.slices.time_s[0])
            fits = self.work + (own + 2) * self.input <= self.slices.devices[0].budget_bytes
            summed_s = 2 * (copies - 1) / copies * (bytes_to[None, :] - bytes_to[:, None]) * byte_s / micro_batches
            stage_s.append(np.where(fits, (times[None, :] - times[:, None]) * own / micro_batches + summed_s, np.inf))
        best = np.full((count + 1, size), np.inf)
        best[0, 0] = 0.0
        origin: dict[tuple[int, int], tuple[int, int]] = {}  # devices and end -> the same before the last stage
        for devices in range(1, count + 1):
            for copies in range(1, min(devices, len(stage_s)) + 1):
                through = np.maximum(np.maximum(best[devices - copies], sent_s)[:, None], stage_s[copies - 1])
                starts, ends = through.argmin(axis=0), through.min(axis=0)
                for b in map(int, np.flatnonzero(ends < best[devices])):
                    best[devices, b], origin[devices, b] = ends[b], (devices - copies, int(starts[b]))
        place = int(np.argmin(best[:, size - 1])), size - 1
        if not np.isfinite(best[place]):
            return None
        found = []
        while place[1] > 0:
            before = origin[place]
            found.append((place[1], place[0] - before[0]))
            place = before
        return found[::-1]

    def _entry(self, ends: list[np.ndarray], turn: int, earlier: range, start: bool) -> tuple[np.ndarray, np.ndarray]:
        """Per a the bottleneck of what comes before a stage of this turn, its message included, and which turn."""
        size = len(self.crossing)
        entry, before = np.full(size, np.inf), np.zeros(size, dtype=int)
        entry[0] = 0.0 if start else np.inf
        for p in (p for p in earlier if p >= 0):
            rows = np.maximum(ends[p], self._sent_s(p % self.count, turn % self.count))
            rows[0] = np.inf
            before[rows < entry] = p
            entry = np.minimum(entry, rows)
        return entry, before

    def _sent_s(self, src: int, dst: int) -> np.ndarray:
        """Per cut the seconds of the message that crosses it."""
        if (src, dst) not in self.sent_s:
            self.sent_s[src, dst] = np.array([self.loads.message_s(src, dst, n) for n in self.crossing])
        return self.sent_s[src, dst]

    def _stage_s(self, turn: int, turns: int) -> np.ndarray:
        device = self.slices.devices[turn % self.count]
        times = np.array(self.slices.time_s[turn % self.count])
        held = self.slices.micro_batches * -(-turns // self.count) + 2
        fits = self.work + held * self.input <= device.budget_bytes
        return np.where(fits, times[None, :] - times[:, None], np.inf)
