"""`partition-pipedream`: the contiguous stages whose slowest unit is fastest (PipeDream's planner, without replicas).

In: blocks with costs. Out: `draft.partition` and `draft.stages`. Dynamic programming over the devices in turn and the
cuts minimises the bottleneck of the pipeline,

    A(b, s) = min over a < b, p < s of max(A(a, p), c_a / B(p, s), T_s(a, b))

the time of the slowest of all stages and messages when blocks[:b] run on devices up to s: `T_s(a, b)` forward and
backward seconds of blocks[a:b] on device s, infinite where they do not fit its memory; `c_a` the bytes that cross the
cut at a and their gradients; `B(p, s)` the rate from device p to s. A device may be passed over, so that a slow one, or
a slow link, need not be used. Where a stage per device does not fit, each device gets 2, 3, ... turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..draft import Draft
from .fill import fewest_rounds
from .loads import Loads
from .partition import Partition, StagesDecision, asked_stages
from .slices import Slices

Route = list[tuple[int, int]]  # per stage: the turn of its device, and the block after its last one


@dataclass(frozen=True)
class PartitionPipedream(Partition):
    """`stages`: the number of stages, on the devices in turn; 0 leaves it to the search."""

    name: ClassVar[str] = "partition-pipedream"
    stages: int = 0

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where no contiguous stages fit, `PassError` for more stages than blocks."""
        count = draft.lane_hardware.num_devices
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
