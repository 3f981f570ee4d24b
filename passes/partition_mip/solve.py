"""How far the best known partition can be from the optimum, and better partitions where the solver finds them.

In: a `MipProblem` and the local search's results. Out: a `Proof`. A node is a range of numbers of stages and says of
some devices whether they are resident. The node with the least bound is split in two: first by the residence of one
more device, each half bounded by `TotalsModel`, until that is known of all; then by the number of stages modulo N and
by its range, bounded by the relaxed `CountModel`. For one number of stages integer counts faster than a cutoff are
looked for, and judged by the recurrence, which also takes what the model leaves out; where there are none, the next
cutoff is closer to the best partition. The search ends when the least bound reaches the best partition but for `CLOSE`,
or at the deadline. python-mip and HiGHS may be absent, fail, or be too slow: what is proven until then stays, and the
proof says what happened. Where many devices could be resident, the partitions with the same resident devices as the
best one are bounded first, and the others in the time that is left.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from .bounds import closed_form_s
from .limits import BlockLimits
from .local_search import Search
from .problem import MipProblem
from .recurrence import residents

CLOSE = 5e-3  # a gap not worth closing
GAPS = (0.05, 0.02, 0.01, CLOSE)  # what is proven for one number of stages, one after the other
TOTALS_SHARE = 0.03  # the most of the time left that one program over totals may take
MOST_CHOICES = 32  # with more choices of resident devices, those of the best partition come first
SAME_SHARE = 0.6  # of the time, for these
Residents = tuple[bool | None, ...]  # None: either


@dataclass
class Proof:
    """`lower_s`: no partition is faster, as far as `condition` holds; `always_s`: none is, whether it holds or not.
    `trouble`: what went wrong with the solver."""

    lower_s: float
    how: str
    always_s: float
    condition: str = ""
    trouble: str = ""


@dataclass(order=True)
class _Node:
    """Partitions into `fewest`, `fewest` + `step`, ... `count` stages."""

    bound_s: float
    residents: Residents = field(compare=False)
    fewest: int = field(compare=False)
    count: int = field(compare=False)
    step: int = field(compare=False, default=1)
    solved: bool = field(compare=False, default=False)


def prove(search: Search, counts: Sequence[int], until_s: float) -> Proof:
    """Bound all partitions into `counts` stages (consecutive numbers); may improve `search.best`.

    `until_s`: a value of `time.process_time`, so that the result does not depend on what else the machine does.
    """
    p, begin_s = search.problem, time.process_time()
    closed_s = min(*(closed_form_s(p, count) for count in counts), min(search.best.values())[0])
    closed = Proof(closed_s, "closed form", closed_s)
    try:
        import mip  # noqa: F401  (only to say what is missing)

        from .model import CountModel
        from .totals import TotalsModel
    except Exception as error:  # python-mip loads native libraries, which may fail in any way
        closed.trouble = f"the solver is missing ({type(error).__name__}: {error}); the local search's answer was taken"
        return closed
    tree = _Tree(search, CountModel, TotalsModel, until_s)
    stays = tuple(residents(p, min(search.best.values())[1]))
    stays += (False,) * (len(p.units) - len(stays))
    try:
        with _collecting_between_models():
            few = 2 ** _able(p, counts) <= MOST_CHOICES
            same_s = math.inf if few else tree.run(_roots(p, counts, stays), begin_s + SAME_SHARE * (until_s - begin_s))
            others_s = tree.run(_roots(p, counts), until_s, () if few else stays)
    except Exception as error:  # whatever a solver raises, the local search has an answer
        closed.trouble = f"the solver failed ({type(error).__name__}: {error}); the local search's answer was taken"
        return closed
    always_s = min(max(min(same_s, others_s), closed_s), tree.best_s())
    proof = Proof(always_s, tree.how(), always_s, "", "the solver ran out of time" if tree.late else "")
    if others_s < same_s < math.inf:
        names = "no device" if not any(stays) else f"{sum(stays)} of {len(stays)} devices"
        proof.lower_s = min(max(same_s, closed_s), tree.best_s())
        proof.condition = f"among plans with {names} resident"
    return proof


@contextmanager
def _collecting_between_models() -> Iterator[None]:
    """Keep Python's collector of reference cycles out of the solver.

    A model of python-mip is part of a cycle, and calls its library when it is collected. If that happens while the
    library's interface holds its lock, which it cannot take twice, this thread waits for itself for ever. `_Tree`
    collects what is young between models.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _able(p: MipProblem, counts: Sequence[int]) -> int:
    """The number of devices that could hold their share of the fewest stages across steps."""
    if p.swap:
        return 0
    held = [(b - a) + p.update.state_bytes * q for a, b, q in _steps(p)]
    least = math.fsum(sorted(held)[: min(counts) // len(p.units)])
    return sum(least <= unit.budget_bytes for unit in p.units)


def _steps(p: MipProblem) -> Iterator[tuple[float, float, float]]:
    """Per block the running sums of weights and gradients before and after it, and its parameters."""
    both = [w + g for w, g in zip(p.weight_bytes, p.grad_bytes)]
    for i, (a, b) in enumerate(itertools.pairwise(both)):
        yield a, b, p.params[i + 1] - p.params[i]


def _roots(p: MipProblem, counts: Sequence[int], stays: Residents = ()) -> Iterator[_Node]:
    """All numbers of stages from N on in one node; fewer, which leave devices without a stage, in one each."""
    n = len(p.units)
    either: Residents = stays or (False if p.swap else None,) * n
    for count in (count for count in counts if count < n):
        yield _Node(closed_form_s(p, count), either[:count] + (False,) * (n - count), count, count)
    low, high = max(n, min(counts)), max(counts)
    if low <= high:
        yield _Node(min(closed_form_s(p, count) for count in range(low, high + 1)), either, low, high)


class _Tree:
    def __init__(self, search: Search, model: Any, totals: Any, until_s: float):
        self.search, self.model, self.totals, self.until_s = search, model, totals, until_s
        self.done: Residents = ()
        self.limits = BlockLimits(search.problem)
        self.counted = {"programs over totals": 0, "linear relaxations": 0, "integer programs": 0}
        self.late = False

    def how(self) -> str:
        return " and ".join(f"{number} {what}" for what, number in self.counted.items() if number) or "closed form"

    def best_s(self) -> float:
        return min(self.search.best.values())[0]

    def run(self, roots: Iterator[_Node], until_s: float, done: Residents = ()) -> float:
        """The least bound over all nodes; those with the resident devices `done` are bounded already."""
        self.until_s, self.late, self.done = until_s, False, done
        heap = list(roots)
        heapq.heapify(heap)
        while heap and heap[0].bound_s < self.best_s() * (1 - CLOSE) and not heap[0].solved and not self.over():
            node = heapq.heappop(heap)
            for finer in self.refine(node):
                heapq.heappush(heap, finer)
        return min(heap[0].bound_s if heap else math.inf, self.best_s())

    def over(self) -> bool:
        self.late = self.late or time.process_time() > self.until_s
        return self.late

    def left_s(self) -> float:
        return max(0.05, self.until_s - time.process_time())

    def refine(self, node: _Node) -> list[_Node]:
        n = len(self.search.problem.units)
        if None in node.residents:
            d = node.residents.index(None)
            choices = [(*node.residents[:d], stays, *node.residents[d + 1 :]) for stays in (True, False)]
            known = self.done if node.count >= n else ()
            return [self.total(replace(node, residents=each)) for each in choices if each != known]
        if node.step < n and node.fewest < node.count:
            tops = range(node.count, max(node.count - n, node.fewest - 1), -1)
            parts = [(top - (top - node.fewest) // n * n, top) for top in tops]
        elif node.fewest < node.count:
            middle = node.fewest + (node.count - node.fewest) // n // 2 * n
            parts = [(node.fewest, middle), (middle + n, node.count)]
        else:
            return [self.solve(node)]
        return [self.relax(replace(node, fewest=low, count=high, step=n)) for low, high in parts]

    def total(self, node: _Node) -> _Node:
        """Bound all partitions of the node by what each device holds in all."""
        import mip

        if self.over():
            return node
        gc.collect(0)  # the model before
        model = self.totals(self.limits, node.fewest, node.count, node.residents).model
        model.max_mip_gap = CLOSE / 4
        status = model.optimize(max_seconds=max(0.05, TOTALS_SHARE * self.left_s()))
        self.counted["programs over totals"] += 1
        if status == mip.OptimizationStatus.INFEASIBLE:
            self.raised(node, math.inf)
        elif model.objective_bound is not None and math.isfinite(model.objective_bound):
            self.raised(node, model.objective_bound)
        return node

    def cutoff_s(self, node: _Node) -> float:
        """What is looked for next in one number of stages: a step faster than this. There is none, or the node's bound
        rises to the fastest one."""
        bounds = (self.best_s() * (1 - gap) for gap in GAPS)
        return next((bound_s for bound_s in bounds if bound_s > node.bound_s * (1 + 1e-6)), self.best_s())

    def relax(self, node: _Node) -> _Node:
        """Bound by the linear model."""
        import mip

        if self.over():
            return node
        gc.collect(0)  # the model before
        cutoff_s = self.best_s() * (1 - CLOSE)
        model = self.model(self.limits, node.count, node.residents, fewest=node.fewest, cutoff_s=cutoff_s).model
        model.lp_method = mip.LP_Method.BARRIER  # twice as fast as the simplex method on the largest of these
        status = model.optimize(relax=True, max_seconds=self.left_s())
        self.counted["linear relaxations"] += 1
        if status == mip.OptimizationStatus.OPTIMAL:
            self.raised(node, min(model.objective_value, cutoff_s))
        elif status == mip.OptimizationStatus.INFEASIBLE:
            self.raised(node, cutoff_s if node.fewest == node.count else math.inf)
        return node

    def solve(self, node: _Node) -> _Node:
        """Look for integer counts faster than the cutoff: the node's bound rises, and the search climbs from them."""
        import mip

        gc.collect(0)  # the model before
        cutoff_s = self.cutoff_s(node)
        counted = self.model(self.limits, node.count, node.residents, integer=True, cutoff_s=cutoff_s)
        counted.row(cutoff_s, counted.end)
        counted.model.max_mip_gap = CLOSE / 4
        status = counted.model.optimize(max_seconds=self.left_s())
        self.counted["integer programs"] += 1
        if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
            self.raised(node, cutoff_s)
            return node
        node.solved = True
        bound_s = counted.model.objective_bound
        if bound_s is not None and math.isfinite(bound_s):
            self.raised(node, min(bound_s, cutoff_s))
        if counted.model.num_solutions and counted.ordered:
            cuts = counted.cuts()
            if all(a < b for a, b in itertools.pairwise(cuts)) and cuts[-1] == self.search.problem.num_blocks:
                self.search.climb(cuts, {node.count})
        return node

    @staticmethod
    def raised(node: _Node, bound_s: float) -> None:
        node.bound_s = max(node.bound_s, bound_s)
