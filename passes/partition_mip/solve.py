"""How far the best known partition can be from the optimum, and better partitions where the solver finds them.

In: a `MipProblem` and the local search's results. Out: a `Proof`. Every node is a range of numbers of stages (those
equal modulo N) and a choice of resident devices; its lower bound is the optimum of the relaxed `CountModel`. The node
with the least bound is split in two until it is one number of stages, and then solved with integer counts; the counts
are judged by the recurrence, which also takes what the model leaves out. The search ends when the least bound reaches
the best partition, or at the deadline. python-mip and HiGHS may be absent, fail, or be too slow: what is proven until
then stays, and the proof says what happened.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .bounds import closed_form_s
from .local_search import Search
from .problem import MipProblem

CLOSE = 1e-3  # a gap not worth closing
MOST_CHOICES = 32  # up to this number of choices of resident devices, all are tried
Residents = tuple[bool, ...]


@dataclass
class Proof:
    """`lower_s`: no partition is faster, as far as `condition` holds. `trouble`: what went wrong with the solver."""

    lower_s: float
    how: str
    condition: str = ""
    trouble: str = ""


@dataclass(order=True)
class _Node:
    bound_s: float
    residents: Residents = field(compare=False)
    fewest: int = field(compare=False)
    count: int = field(compare=False)
    solved: bool = field(compare=False, default=False)


def prove(search: Search, counts: Sequence[int], residents: Residents, until_s: float) -> Proof:
    """Bound all partitions into `counts` stages (consecutive numbers); may improve `search.best`.

    `residents`: per device whether it is resident in the best partition. `until_s`: a value of `time.process_time`, so
    that the result does not depend on what else the machine does.
    """
    p = search.problem
    closed = Proof(min(closed_form_s(p, count) for count in counts), "closed form")
    try:
        import mip  # noqa: F401  (only to say what is missing)

        from .model import CountModel
    except Exception as error:  # python-mip loads native libraries, which may fail in any way
        closed.trouble = f"the solver is missing ({type(error).__name__}: {error}); the local search's answer was taken"
        return closed
    choices, condition = _choices(p, counts, residents)
    tree = _Tree(search, CountModel, until_s)
    try:
        with _collecting_between_models():
            lower_s = tree.run(_roots(p, counts, choices))
    except Exception as error:  # whatever a solver raises, the local search has an answer
        closed.trouble = f"the solver failed ({type(error).__name__}: {error}); the local search's answer was taken"
        return closed
    proof = Proof(max(lower_s, closed.lower_s), tree.how(), condition)
    if tree.late:
        proof.trouble = "the solver ran out of time"
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


def _choices(p: MipProblem, counts: Sequence[int], residents: Residents) -> tuple[list[Residents], str]:
    """Choices of resident devices, and the condition of the proof: all choices among devices that could hold their
    share of the fewest stages; where those are too many, only that of the best partition."""
    n = len(p.units)
    if p.swap:
        return [(False,) * n], ""
    smallest = sorted(
        p.weight_bytes[i + 1]
        - p.weight_bytes[i]
        + p.grad_bytes[i + 1]
        - p.grad_bytes[i]
        + p.update.state_bytes * (p.params[i + 1] - p.params[i])
        for i in range(p.num_blocks)
    )
    least = math.fsum(smallest[: min(counts) // n])
    able = [least <= unit.budget_bytes for unit in p.units]
    if 2 ** sum(able) <= MOST_CHOICES:
        return list(itertools.product(*((False, True) if yes else (False,) for yes in able))), ""
    names = "no device" if not any(residents) else f"{sum(residents)} of {n} devices"
    return [residents], f"among plans with {names} resident"


def _roots(p: MipProblem, counts: Sequence[int], choices: list[Residents]) -> Iterator[_Node]:
    n, low, high = len(p.units), min(counts), max(counts)
    for top in range(high, max(high - n, low - 1), -1):
        fewest = top - (top - low) // n * n
        for residents in choices:
            yield _Node(min(closed_form_s(p, count) for count in range(fewest, top + 1, n)), residents, fewest, top)


class _Tree:
    def __init__(self, search: Search, model: Any, until_s: float):
        self.search, self.model, self.until_s = search, model, until_s
        self.relaxed = self.solved = 0
        self.late = False

    def how(self) -> str:
        parts = [f"{self.relaxed} linear relaxations"] + ([f"{self.solved} integer programs"] if self.solved else [])
        return " and ".join(parts)

    def best_s(self) -> float:
        return min(self.search.best.values())[0]

    def run(self, roots: Iterator[_Node]) -> float:
        """The least bound over all nodes."""
        heap: list[_Node] = []
        waiting = list(roots)
        for node in waiting:
            heap.append(node if self.over() else self.relax(node))
        heapq.heapify(heap)
        while heap and heap[0].bound_s < self.best_s() * (1 - CLOSE) and not heap[0].solved and not self.over():
            node = heapq.heappop(heap)
            for finer in self.refine(node):
                heapq.heappush(heap, finer)
        return min(heap[0].bound_s if heap else math.inf, self.best_s())

    def over(self) -> bool:
        self.late = self.late or time.process_time() > self.until_s
        return self.late

    def refine(self, node: _Node) -> list[_Node]:
        n = len(self.search.problem.units)
        if node.fewest == node.count:
            return [self.solve(node)]
        middle = node.fewest + (node.count - node.fewest) // n // 2 * n
        halves = [
            _Node(node.bound_s, node.residents, node.fewest, middle),
            _Node(node.bound_s, node.residents, middle + n, node.count),
        ]
        return [self.relax(half) for half in halves]

    def relax(self, node: _Node) -> _Node:
        import mip

        gc.collect(0)  # the model before
        model = self.model(self.search.problem, node.count, node.residents, fewest=node.fewest).model
        model.lp_method = mip.LP_Method.BARRIER  # twice as fast as the simplex method on the largest of these
        status = model.optimize(relax=True, max_seconds=max(0.05, self.until_s - time.process_time()))
        self.relaxed += 1
        if status == mip.OptimizationStatus.OPTIMAL:
            node.bound_s = max(node.bound_s, model.objective_value)
        elif status == mip.OptimizationStatus.INFEASIBLE:
            node.bound_s = math.inf
        return node

    def solve(self, node: _Node) -> _Node:
        """Solve with integer counts: the node's bound rises, and the search climbs from the counts found."""
        import mip

        gc.collect(0)  # the model before
        counted = self.model(self.search.problem, node.count, node.residents, integer=True)
        counted.model.max_mip_gap = CLOSE / 4
        status = counted.model.optimize(max_seconds=max(0.05, self.until_s - time.process_time()))
        self.solved += 1
        node.solved = True
        if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
            node.bound_s = math.inf
            return node
        if counted.model.objective_bound is not None and math.isfinite(counted.model.objective_bound):
            node.bound_s = max(node.bound_s, counted.model.objective_bound)
        if counted.model.num_solutions:
            cuts = counted.cuts()
            if all(a < b for a, b in itertools.pairwise(cuts)) and cuts[-1] == self.search.problem.num_blocks:
                self.search.climb(cuts, {node.count})
        return node
