"""Tighter bounds where blocks differ: stages are intervals of whole blocks, not shares of kinds.

`IntervalModel` is the linear model with one column for each interval of blocks, stage, and choice to keep saved
tensors: a path over cuts from the first block to the last one. Memory and messages are those of the intervals. It
speaks of one number of stages. Columns touch the schedule only through the amounts of a stage (seconds, weights,
memory, messages). So the relaxation of a `CountModel` bounds them, too, in far less time: if x are the amounts of its
solution, and y what a unit more of each costs (the duals of the rows that define them), then

    step(P) >= step(x) + y (amounts(P) - x)        for each partition P (Lagrange)

since the least step is convex in the amounts. The least y amounts(P) over all partitions is a shortest path over cuts,
in O(S L^2): the bound of all columns at these duals. Columns on no path faster than the cutoff are left out.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import mip
import numpy as np
from numpy.typing import NDArray

from .limits import BlockLimits
from .model import CountModel

GB = 1e9
Matrix = NDArray[Any]  # [first block, end] of an interval


class IntervalTables:
    """Amounts of all intervals of a problem."""

    def __init__(self, limits: BlockLimits):
        p = self.p = limits.p
        self.limits, length = limits, p.num_blocks
        ends = np.arange(length + 1)
        self.blocks = ends[None, :] - ends[:, None]
        work, inputs = np.zeros((length + 1, length + 1)), np.zeros((length + 1, length + 1))
        for b in range(1, length + 1):
            work[:b, b], inputs[:b, b] = p.work_bytes[b][:b], p.input_bytes[b][:b]
        grads = _between(p.grad_bytes)
        self.amounts = {
            "weights": _between(p.weight_bytes) / GB,
            "grads": grads / GB,
            "params": _between(p.params) / GB,
            "calls": _between(p.tensors),
            "work": (work - grads) / GB,
            "inputs": p.micro_batches * inputs / GB,
            "message": np.repeat(np.array(p.message_bytes)[:, None] / GB, length + 1, axis=1),
        }
        self.kept = _between(p.kept_bytes) / GB
        self.forward, self.backward, self.again = (
            [_between(row) for row in rows] for rows in (p.forward_s, p.backward_s, p.again_s)
        )
        self.needs = [
            _between(p.weight_bytes) + work + (p.micro_batches * r + 2) * inputs for r in range(1, length + 1)
        ]
        self.common = _between(np.concatenate([[0], np.cumsum([kind == limits.common for kind in p.kinds])]))

    def allowed(self, counted: Any, j: int) -> tuple[Matrix, Matrix]:
        """Which intervals may be stage j, and which of them may keep saved tensors."""
        p, stages = self.p, counted.stages
        window, rounds = stages.windows[j], -(-(counted.count - counted.idle) // counted.n)
        fits = (self.blocks > 0) & (self.blocks <= stages.most[j])
        fits &= self.needs[rounds - 1] <= p.units[j % counted.n].budget_bytes
        fits[: window.start] = False
        fits[:, window.stop + 1 :] = False
        if counted.most is not None:
            fits &= self.common <= counted.most
        kinds = {p.kinds[i]: i for i in reversed(window)}
        keeps = {kind: stages.keeps(j, i) for kind, i in kinds.items()}
        lost = [not keeps.get(kind, False) for kind in p.kinds]
        return fits, fits & (_between(np.concatenate([[0], np.cumsum(lost)])) == 0)

    def costs(self, counted: Any, j: int, y: dict[str, float]) -> tuple[Matrix, Matrix]:
        """y amounts of each interval as stage j that runs again, and that keeps saved tensors; inf where it cannot."""
        d, own_s = j % counted.n, self.p.units[j % counted.n].own_s if j >= counted.idle else 0.0
        fits, keeps = self.allowed(counted, j)
        whole = y["forward"] * (self.forward[d] + own_s) + y["backward"] * (self.backward[d] + own_s)
        for name, amount in self.amounts.items():
            if y.get(name):
                whole = whole + y[name] * amount
        again = np.where(fits, whole + y["backward"] * self.again[d], math.inf)
        if j < counted.idle:
            again[0, 0] = 0.0
        return again, np.where(keeps, whole + y["kept"] * self.kept, math.inf)

    def through(self, counted: Any) -> list[tuple[Matrix, Matrix]]:
        """From a relaxation's solution, per stage and interval, seconds that no partition with it is faster than: if it
        runs again, and if it keeps saved tensors."""
        duals = [{name: row.pi for name, (_, row) in mine.items()} for mine in counted.links]
        now = math.fsum(y * mine[name][0].x for mine, costs in zip(counted.links, duals) for name, y in costs.items())
        found = [self.costs(counted, j, y) for j, y in enumerate(duals)]
        least = [np.minimum(*pair) for pair in found]
        before = [np.full(self.p.num_blocks + 1, math.inf)]
        before[0][0] = float(counted.model.objective_value) - now
        for cost in least:
            before.append((before[-1][:, None] + cost).min(axis=0))
        after = np.full(self.p.num_blocks + 1, math.inf)
        after[-1] = 0.0
        for j in reversed(range(counted.count)):
            found[j] = (
                before[j][:, None] + found[j][0] + after[None, :],
                before[j][:, None] + found[j][1] + after[None, :],
            )
            after = (least[j] + after[None, :]).min(axis=1)
        return found

    def bound_s(self, counted: Any) -> float:
        """Seconds that no partition of the model is faster than; inf where it has none."""
        return float(min(part.min() for part in self.through(counted)[0]))


class IntervalModel(CountModel):
    """`count` stages, none of which is empty."""

    def __init__(self, intervals: IntervalTables, counted: CountModel, cutoff_s: float, **more: Any):
        """Of the partitions of a solved `counted`, those that may be faster than `cutoff_s`."""
        self.intervals = intervals
        self.useful = [[part < cutoff_s for part in pair] for pair in intervals.through(counted)]
        super().__init__(intervals.limits, counted.count, counted.resident, cutoff_s=cutoff_s, **more)

    def place_blocks(self) -> None:
        """One path: stage j + 1 begins where stage j ends."""
        self.columns: list[list[tuple[int, int, bool, Any]]] = []
        for j in range(self.count):
            found = [(a, b, kept) for kept in (False, True) for a, b in np.argwhere(self.useful[j][kept])]
            self.columns.append([(int(a), int(b), kept, self.real()) for a, b, kept in found])
        self.model += mip.xsum(x for *_, x in self.columns[0]) == 1
        for before, after in itertools.pairwise(self.columns):
            passed = defaultdict(list)
            for _, b, _, x in before:
                passed[b].append(x)
            for a, _, _, x in after:
                passed[a].append(-1 * x)
            for terms in passed.values():
                self.model += mip.xsum(terms) == 0
        self.counts = [{} for _ in self.columns]

    def at_most(self, most: int) -> None:
        """Larger intervals have no column."""

    def stage_sums(self) -> None:
        tables, self.links = self.intervals, []
        rows: dict[str, list[Any]] = defaultdict(list)
        for j, columns in enumerate(self.columns):
            d, own_s = j % self.n, self.p.units[j % self.n].own_s
            times = {"forward": tables.forward[d] + own_s, "backward": tables.backward[d] + own_s}
            for name, table in {**times, **tables.amounts, "kept": tables.kept}.items():
                total = self.model.add_var(lb=-math.inf)
                parts = [
                    float(table[a, b] + (tables.again[d][a, b] if name == "backward" and not kept else 0.0)) * x
                    for a, b, kept, x in columns
                    if kept or name != "kept"
                ]
                self.model += total == mip.xsum(parts)
                rows[name].append(total)
        self.tf, self.tb, self.w, self.g = (rows[name] for name in ("forward", "backward", "weights", "grads"))
        self.q, self.calls, self.kept, self.work = (rows[name] for name in ("params", "calls", "kept", "work"))
        self.crossing, self.inputs = rows["message"], rows["inputs"]

    def entering(self) -> list[Any]:
        return self.inputs


def _between(sums: Any) -> Matrix:
    """An amount of all intervals, from its running sums."""
    values = np.asarray(sums, float)
    found: Matrix = values[None, :] - values[:, None]
    return found
