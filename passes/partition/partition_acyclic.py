"""`partition-acyclic`: greedy partitioning of the block graph that keeps the graph of stages acyclic (a rival of
FTPipe 4.2; Moreira, Popp and Schulz, "Graph partitioning with acyclicity constraints", with the pipeline's throughput
as the objective and every device's memory as a constraint).

In: blocks with costs. Out: `draft.partition` and `draft.stages`. The devices come in turn, as often as memory needs;
each turn is one stage. The start is a topological order cut by filling the turns up to the least time that suffices.
Then single blocks move between stages as long as that makes the busiest device less busy, or, if that stays equal, the
second busiest, and so on; a device is busy with its blocks and with its messages. A block may go to any stage from that
of its last maker to that of its first reader: no stage then reads a later one, and stages need not be runs of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..draft import Draft
from .fill import fewest_rounds, fill
from .loads import BlockIds, Loads, decision_of
from .partition import Partition, StagesDecision
from .slices import Slices

SWEEPS = 30
BISECTIONS = 30


@dataclass(frozen=True)
class PartitionAcyclic(Partition):
    name: ClassVar[str] = "partition-acyclic"
    rank: ClassVar[int] = 35

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where a block is larger than any device."""
        slices = Slices(draft)
        rounds = fewest_rounds(slices)
        greedy = _Greedy(Loads(draft), rounds * draft.lane_hardware.num_devices, _start(slices, rounds))
        greedy.improve()
        used = [turn for turn in range(greedy.num_turns) if turn in greedy.turn_of]
        return decision_of(draft, [greedy.stage(turn) for turn in used], [greedy.device(turn) for turn in used])


def _start(slices: Slices, rounds: int) -> list[int]:
    """The turn of each block in the contiguous filling with the least time per turn."""
    best = fill(slices, rounds)
    low_s, high_s = 0.0, max(slices.stage_time_s(a, b, turn) for a, b, turn in best)
    for _ in range(BISECTIONS):
        middle_s = (low_s + high_s) / 2
        if found := fill(slices, rounds, middle_s):
            best, high_s = found, middle_s
        else:
            low_s = middle_s
    return [turn for a, b, turn in best for _ in range(a, b)]


class _Greedy:
    """Moves blocks one by one. `busy_s`: per device the seconds of its blocks and messages."""

    def __init__(self, loads: Loads, num_turns: int, turn_of: list[int]):
        self.loads, self.num_turns, self.turn_of = loads, num_turns, turn_of
        self.count = len(loads.devices)
        self.busy_s = [0.0] * self.count
        for block, turn in enumerate(turn_of):
            self.busy_s[self.device(turn)] += loads.time_s[self.device(turn)][block]
        self._messages(loads.readers, 1)

    def device(self, turn: int) -> int:
        return turn % self.count

    def stage(self, turn: int) -> BlockIds:
        return tuple(block for block, t in enumerate(self.turn_of) if t == turn)

    def improve(self) -> None:
        for _ in range(SWEEPS):
            if not any([self._improve(block) for block in range(len(self.turn_of))]):
                return

    def _improve(self, block: int) -> bool:
        """Move a block to the best of its turns, if that is not where it is."""
        own, loads = self.turn_of[block], self.loads
        first = max((self.turn_of[i] for i in loads.before[block]), default=0)
        last = min((self.turn_of[i] for i in loads.after[block]), default=self.num_turns - 1)
        rows = []
        for turn in range(first, last + 1):
            self._move(block, turn)
            rows.append((sorted(self.busy_s, reverse=True), turn))
            self._move(block, own)
        now = next(busy for busy, turn in rows if turn == own)
        for busy, turn in sorted(rows):
            if not _is_less(busy, now):
                return False
            self._move(block, turn)
            if self._fits(own) and self._fits(turn):
                return True
            self._move(block, own)
        return False

    def _move(self, block: int, turn: int) -> None:
        touched = [*self.loads.reads[block], *(n for n in self.loads.blocks[block].outputs if n in self.loads.readers)]
        self._messages(touched, -1)
        self.busy_s[self.device(self.turn_of[block])] -= self.loads.time_s[self.device(self.turn_of[block])][block]
        self.turn_of[block] = turn
        self.busy_s[self.device(turn)] += self.loads.time_s[self.device(turn)][block]
        self._messages(touched, 1)

    def _messages(self, values: Iterable[fx.Node], sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) the seconds of values, once per device that reads them, at both ends."""
        for value in values:
            src = self.device(self.turn_of[self.loads.home[value]])
            for dst in {self.device(self.turn_of[reader]) for reader in self.loads.readers[value]} - {src}:
                message_s = sign * self.loads.message_s(src, dst, self.loads.value_bytes(value))
                self.busy_s[src] += message_s
                self.busy_s[dst] += message_s

    def _fits(self, turn: int) -> bool:
        device = self.device(turn)
        stages = [self.stage(t) for t in range(device, self.num_turns, self.count)]
        return self.loads.fits([stage for stage in stages if stage], device)


def _is_less(busy: list[float], than: list[float]) -> bool:
    """Whether `busy` is less by more than the rounding errors of adding and subtracting seconds."""
    margin_s = 1e-9 * than[0]
    first = next(((a, b) for a, b in zip(busy, than) if abs(a - b) > margin_s), None)
    return first is not None and first[0] < first[1]
