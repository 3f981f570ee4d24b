"""Bounds of one stage, whatever the other cuts are.

In: a `MipProblem`. Out: bounds of memory and time, by stage and number of blocks, from which the linear model takes its
constants: which blocks a stage may hold, how many, which saved tensors it can keep, what enters it. A `cutoff_s` bounds
the number of blocks: more of them would take their device longer than that, so they belong to no faster step.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..problem import LIKE, MipProblem

BlockIntervals = Sequence[NDArray[np.bool_]]  # by stage, [first block, end]


@dataclass(frozen=True)
class Largest:
    """Facts about the stages with the most common blocks: they have `least` to `most`. `reruns`: whether a stage
    with at least `least` runs its forward again. None: any."""

    least: int = 0
    most: int | None = None
    reruns: bool | None = None


ANY_LARGEST = Largest()


class BlockLimits:
    """Tables of a problem, shared by all models of it. Bytes and seconds."""

    def __init__(self, p: MipProblem):
        self.p, length = p, p.num_blocks
        self.ends = self._ends()
        work = np.full((length + 1, length + 1), -math.inf)  # [number of blocks][first block]
        for b in range(1, length + 1):
            for a in range(b):
                if b <= self.ends[a]:
                    work[b - a, a] = p.work_bytes[b][a]
        self._most_work = np.maximum.accumulate(work.max(axis=1))
        self.added = self._added_bytes()
        self.floor = math.fsum(min(0.0, added) for added in self.added)
        alone = [p.work_bytes[i + 1][i] - (p.grad_bytes[i + 1] - p.grad_bytes[i]) for i in range(length)]
        self.scratches = [once - added for once, added in zip(alone, self.added)]
        self.entering = [min(p.input_bytes[b][a] for b in range(a + 1, length + 1)) for a in range(length)]
        self.weights = np.diff(p.weight_bytes).tolist()
        self.lasting = (np.diff(p.weight_bytes) + p.update.state_bytes * np.diff(p.params)).tolist()
        self.common, self.num_common = Counter(p.kinds).most_common(1)[0]  # the kind of most blocks, and their number
        self.unlike = self.num_common < LIKE * length

    def _ends(self) -> list[int]:
        """By first block, where stages that fit some device and have it end at most: of larger ones, which are no part
        of one that fits, memory is not known, but that it is too small."""
        p, length = self.p, self.p.num_blocks
        budget = max(unit.budget_bytes for unit in p.units)
        fit = ([b for b in range(a + 1, length + 1) if p.need_bytes(a, b, 1) <= budget] for a in range(length))
        return list(itertools.accumulate((max(ends, default=a + 1) for a, ends in enumerate(fit)), max))

    def _added_bytes(self) -> list[float]:
        """Per block the least bytes that it adds to a stage before or after it, besides weights and gradients, for one
        micro-batch, by kind. Blocks of one stage that share a saved tensor, such as a mask, or the gradient of a
        parameter count it once. So a stage takes at least the sum over its blocks, and the `scratches` of any one."""
        p, length = self.p, self.p.num_blocks
        grads, kept = p.grad_bytes, p.kept_bytes
        once = np.zeros((length + 1, length + 1))  # [end][first block]
        for b in range(1, length + 1):
            once[b, :b] = np.array(p.work_bytes[b][:b]) - (grads[b] - np.array(grads[:b]))
        least: dict[int, float] = {}
        for i, kind in enumerate(p.kinds):
            end, first = self.ends[i], next(a for a in range(i + 1) if self.ends[a] > i)
            before = once[i + 1 : end + 1, i] - once[i + 1 : end + 1, i + 1]
            after = once[i + 1, first : i + 1] - once[i, first : i + 1]
            before[0] = once[i + 1, i]
            added = min(float(before.min()), float(after.min()), kept[i + 1] - kept[i])
            least[kind] = min(least.get(kind, math.inf), added)
        return [least[kind] for kind in p.kinds]

    def most_work(self, blocks: int) -> float:
        """The most bytes that up to `blocks` blocks need besides their weights."""
        return float(self._most_work[min(blocks, self.p.num_blocks)])

    def common_s(self, largest: Largest) -> tuple[float, float]:
        """The least seconds of forward and backward, for one micro-batch, that some stage takes. It may be another one
        whose backward takes longest."""
        p, at, blocks = self.p, self.p.kinds.index(self.common), largest.least

        def least(*tables: list[list[float]]) -> float:
            return blocks * min(math.fsum(row[at + 1] - row[at] for row in rows) for rows in zip(*tables))

        held = self.weights[at] + p.grad_bytes[at + 1] - p.grad_bytes[at]
        held += self.added[at] + (p.micro_batches - 1) * (p.kept_bytes[at + 1] - p.kept_bytes[at])
        held = blocks * held + self.floor
        keeps = held <= max(unit.budget_bytes for unit in p.units) and not largest.reruns
        return least(p.forward_s), least(p.backward_s) if keeps else least(p.backward_s, p.again_s)

    @functools.cached_property
    def seconds(self) -> list[list[float]]:
        """[device][block]: forward and backward of one micro-batch, without rematerialisation."""
        return [np.diff(np.add(f, b)).tolist() for f, b in zip(self.p.forward_s, self.p.backward_s)]

    @functools.cached_property
    def again_too(self) -> list[list[float]]:
        """The same with rematerialisation."""
        return [np.add(row, np.diff(again)).tolist() for row, again in zip(self.seconds, self.p.again_s)]

    @functools.cached_property
    def update_s(self) -> float:
        """The least seconds between the last backward and the end where the hosts update everything."""
        p, hosts = self.p, {unit.host for unit in self.p.units}
        n = len(p.units)
        if not p.update.barrier:
            return 0.0
        rates = [(p.update.params_s[host], p.update.clip_s(host, n)) for host in hosts]
        whole_s = p.params[-1] * min(r for r, _ in rates) + p.grad_bytes[-1] * min(r for _, r in rates)
        return whole_s / len(hosts)


class StageLimits:
    """The stages of a partition into `count`, the first `idle` of which may be empty. `resident` is by device.

    `fewest[j]`, `most[j]`: the numbers of blocks of stage j in a step faster than `cutoff_s`. `left`: the intervals of
    blocks that a stage of such a step may have.
    """

    def __init__(
        self,
        limits: BlockLimits,
        count: int,
        resident: Sequence[bool],
        idle: int = 0,
        cutoff_s: float = math.inf,
        left: BlockIntervals | None = None,
    ):
        self.limits, self.p, self.count, self.resident, self.idle = limits, limits.p, count, resident, idle
        self.n = len(self.p.units)
        self.windows = [range(max(0, j - idle), self.p.num_blocks - (count - 1 - j)) for j in range(count)]
        self.fewest = [int(j >= idle) for j in range(count)]
        self.most = [len(window) for window in self.windows]
        if left is not None:
            self.narrow(left)
        if not idle and cutoff_s < math.inf:
            self.cap(cutoff_s)

    def narrow(self, left: BlockIntervals) -> None:
        """Narrow the windows and numbers of blocks of stages to the intervals that are left."""
        for j, some in enumerate(left):
            first, end = np.nonzero(some)
            self.windows[j] = range(int(first.min()), int(end.max()))
            self.fewest[j], self.most[j] = int((end - first).min()), int((end - first).max())

    def cuts(self, j: int) -> tuple[int, int]:
        """The first and the last place of the cut before stage j."""
        first = self.windows[j].start if j < self.count else self.p.num_blocks
        return first, self.windows[j - 1].stop if j else 0

    def least(self, table: Sequence[float], j: int) -> float:
        """The least of an amount by block that stage j has."""
        window = self.windows[j]
        return min(table[window.start : window.stop]) if j >= self.idle else 0.0

    def cap(self, cutoff_s: float) -> None:
        """Device d works for all micro-batches of its stages, after one passed those before its first one and before
        one passed those after its last one; the other stages have at least one block each."""
        p, n = self.p, self.n
        both = self.limits.seconds
        more = self.limits.again_too
        tables = [
            more[j % n] if not self.resident[j % n] and j < self.count - n else both[j % n] for j in range(self.count)
        ]
        alone = [self.least(table, j) for j, table in enumerate(tables)]
        tail_s = 0.0 if any(self.resident) else self.limits.update_s
        for d in range(min(n, self.count)):
            stages = range(d, self.count, n)
            edges_s = math.fsum(alone[:d]) + math.fsum(alone[stages[-1] + 1 :])
            mine_s = math.fsum(alone[j] for j in stages)
            for j in stages:
                window = self.windows[j]
                left_s = (cutoff_s - tail_s - edges_s) / p.micro_batches - (mine_s - alone[j])
                sums = np.concatenate([[0.0], np.cumsum(tables[j][window.start : window.stop])])
                most, known = 1, min(len(window), self.most[j])
                while most < known and float((sums[most + 1 :] - sums[: -most - 1]).min()) <= left_s:
                    most += 1
                self.most[j] = most

    def most_of(self, sums: Sequence[float], j: int) -> float:
        """The most that stage j may hold of an amount, given as running sums."""
        window, most = self.windows[j], self.most[j]
        values = np.array(sums[window.start : window.stop + 1])
        if most >= len(window):
            return float(values[-1] - values[0])
        return float((values[most:] - values[:-most]).max())

    def keeps(self, j: int, block: int) -> bool:
        """Whether stage j may keep saved tensors if it has this block: it keeps those of all its blocks, or none."""
        p, d, m = self.p, j % self.n, self.p.micro_batches
        if not self.resident[d] and j < self.count - self.n:
            return False
        stages = [i for i in range(d, self.count, self.n) if i >= self.idle]
        before = [i for i in stages if i < j]
        inputs = m * math.fsum(self.least(self.limits.entering, i) for i in (*before, j))
        inputs += 2 * self.least(self.limits.entering, j)
        kept = p.kept_bytes[block + 1] - p.kept_bytes[block]
        grads = p.grad_bytes[block + 1] - p.grad_bytes[block]
        work = grads + (m - 1) * kept + self.limits.added[block] + self.limits.scratches[block] + self.limits.floor
        budget = p.units[d].budget_bytes
        if self.resident[d]:
            others = math.fsum(self.least(self.limits.lasting, i) for i in stages if i != j)
            return bool(others + self.limits.lasting[block] + work + inputs <= budget)
        weights = [self.least(self.limits.weights, i) for i in before] + [self.limits.weights[block]]
        if work + inputs + max(weights) > budget:
            return False
        # It is kept only where no less is fetched early than without: either two stages' weights fit beside it, or an
        # earlier stage needs more memory than this one anyway.
        pairs = max((a + b for a, b in itertools.pairwise(weights)), default=0.0)
        if self.idle or work + inputs + pairs <= budget:
            return True
        others = max((self.limits.most_work(self.most[i]) for i in before), default=0.0)
        return others >= work + m * self.least(self.limits.entering, j)
