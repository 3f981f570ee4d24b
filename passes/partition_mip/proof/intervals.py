"""Tighter bounds where blocks differ: stages are intervals of whole blocks, not shares of kinds.

The blocks of a partition touch the schedule only through the amounts of its stages (seconds, weights, memory,
messages). If x are the amounts in the solution of a relaxed `CountModel`, and y what a unit more of each costs (the
duals of the rows that define them), then

    step(P) >= step(x) + y (amounts(P) - x)        for each partition P (Lagrange)

since the least step is convex in the amounts. The least y amounts(P) over all partitions is a shortest path over cuts,
in O(S L^2), with the memory and the messages of each interval. The shortest path through an interval bounds all
partitions that have it: where that is no faster than a cutoff, it is left out, and the relaxation of what is left knows
more of where cuts are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .limits import BlockLimits

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
        grads = _amounts(p.grad_bytes)
        self.amounts = {
            "weights": _amounts(p.weight_bytes) / GB,
            "grads": grads / GB,
            "params": _amounts(p.params) / GB,
            "calls": _amounts(p.tensors),
            "work": (work - grads) / GB,
            "inputs": p.micro_batches * inputs / GB,
            "message": np.repeat(np.array(p.message_bytes)[:, None] / GB, length + 1, axis=1),
        }
        self.kept = _amounts(p.kept_bytes) / GB
        self.forward, self.backward, self.again = (
            [_amounts(row) for row in rows] for rows in (p.forward_s, p.backward_s, p.again_s)
        )
        self.needs = [
            _amounts(p.weight_bytes) + work + (p.micro_batches * r + 2) * inputs for r in range(1, length + 1)
        ]
        self.common = _amounts(np.concatenate([[0], np.cumsum([kind == limits.common for kind in p.kinds])]))

    def allowed_intervals(self, counted: Any, j: int) -> tuple[Matrix, Matrix]:
        """The intervals that may be stage j, and those of them that may keep saved tensors."""
        p, stages = self.p, counted.stages
        window, rounds = stages.windows[j], -(-(counted.count - counted.idle) // counted.n)
        fits = (self.blocks > 0) & (self.blocks <= stages.most[j])
        fits &= self.needs[rounds - 1] <= p.units[j % counted.n].budget_bytes
        fits[: window.start] = False
        fits[:, window.stop + 1 :] = False
        if counted.left is not None:
            fits &= counted.left[j]
        if counted.of_largest.most is not None:
            fits &= self.common <= counted.of_largest.most
        kinds = {p.kinds[i]: i for i in reversed(window)}
        keeps = {kind: stages.keeps(j, i) for kind, i in kinds.items()}
        lost = [not keeps.get(kind, False) for kind in p.kinds]
        return fits, fits & (_amounts(np.concatenate([[0], np.cumsum(lost)])) == 0)

    def costs(self, counted: Any, j: int, y: dict[str, float]) -> tuple[Matrix, Matrix]:
        """y amounts of each interval as stage j that runs again, and that keeps saved tensors; inf where it cannot."""
        d, own_s = j % counted.n, self.p.units[j % counted.n].own_s if j >= counted.idle else 0.0
        fits, keeps = self.allowed_intervals(counted, j)
        whole = y["forward"] * (self.forward[d] + own_s) + y["backward"] * (self.backward[d] + own_s)
        for name, amount in self.amounts.items():
            if y.get(name):
                whole = whole + y[name] * amount
        reruns = fits
        if counted.of_largest.reruns is False:
            reruns = fits & (self.common < counted.of_largest.least)
        again = np.where(reruns, whole + y["backward"] * self.again[d], math.inf)
        if j < counted.idle and (counted.left is None or counted.left[j][0, 0]):
            again[0, 0] = 0.0
        return again, np.where(keeps, whole + y["kept"] * self.kept, math.inf)

    def stage_costs(self, counted: Any) -> tuple[float, list[Matrix]]:
        """Seconds, and by stage those of each interval, the sum of which no partition of a solved relaxation is faster
        than."""
        duals = [{name: row.pi for name, (_, row) in mine.items()} for mine in counted.links]
        now = math.fsum(y * mine[name][0].x for mine, costs in zip(counted.links, duals) for name, y in costs.items())
        costs = [np.minimum(*self.costs(counted, j, y)) for j, y in enumerate(duals)]
        return float(counted.model.objective_value) - now, costs

    def bound_s(self, counted: Any) -> float:
        """Seconds that no partition of a solved relaxation is faster than; inf where it has none."""
        begin_s, costs = self.stage_costs(counted)
        return float(self.least_before(begin_s, costs)[-1][-1])

    def least_before(self, begin_s: float, costs: Sequence[Matrix]) -> list[Any]:
        """By stage, and after the last one, the least of all stages before a cut."""
        least = [np.full(self.p.num_blocks + 1, math.inf)]
        least[0][0] = begin_s
        for cost in costs:
            least.append((least[-1][:, None] + cost).min(axis=0))
        return least

    def least_through(self, counted: Any) -> list[Matrix]:
        """By stage and interval, seconds that no partition of a solved relaxation with that stage is faster than; inf
        where there is none."""
        begin_s, costs = self.stage_costs(counted)
        found, after = [], np.full(self.p.num_blocks + 1, math.inf)
        after[-1] = 0.0
        for cost, before in zip(reversed(costs), self.least_before(begin_s, costs)[-2::-1]):
            onward = cost + after
            found.append(before[:, None] + onward)
            after = onward.min(axis=1)
        return found[::-1]


def _amounts(sums: Any) -> Matrix:
    """An amount of all intervals, from its running sums."""
    values = np.asarray(sums, float)
    found: Matrix = values[None, :] - values[:, None]
    return found
