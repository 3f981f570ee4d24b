"""Bounds the distance of the best known partition from the optimum, and finds better partitions where it can.

In: a `MipProblem` and the local search's results. Out: a `Proof`. A node is a range of numbers of stages; it says how
many devices are resident, of some whether they are, and how many of the common blocks the largest stage has. The node
with the least bound is split, each part bounded by `TotalsModel`: by the number of resident devices; by which ones are,
where they cannot take each other's places; by the largest stage, where that says more; by the range of the number of
stages, as long as it is wide; and by which are resident, where they can. Then parts are bounded by the relaxed
`CountModel`: by the number of stages modulo N, where devices cannot take each other's places; by the largest stage,
where it has one layer; and by the range again. Where few partitions are left, all are tried.
How many blocks keep their saved tensors at most, in whole ones, is known to all programs (`most_kept`).
Where blocks are unlike, one number of stages is bounded with their order, again without the intervals of blocks that no
partition faster than a cutoff has, and with a whole number of blocks on each device. Then integer counts faster than
the cutoff are looked for, and judged by the recurrence, which also takes what the model leaves out; where there are
none, the next cutoff is closer to the best partition. The search ends when the least bound reaches the best partition
but for `CLOSE`, or after so much work (`passes/work_limit.py`), so that it finds the same on every machine. python-mip
and HiGHS may be absent or fail: then the local search's answer stays, and the proof says what happened.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...work_limit import WorkDone
from ..local_search import Cuts, Proof, Search
from ..problem import MipProblem
from .closed_form import closed_form_s
from .limits import ANY_LARGEST, BlockIntervals, BlockLimits, Largest
from .most_kept import NONE, MostKept

CLOSE = 5e-3  # a gap not worth closing
GAPS = (0.2, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02, 0.01, CLOSE)  # what is proven of a node, one after the other
TOTALS_NODES, COUNT_NODES = 1, 10  # the most nodes of the solver's own tree, at first, for one program of each sort
WHOLE_NODES = 30  # for one with a whole number of blocks on each device
MORE_NODES = 4  # the factor of nodes where these were too few
TOTALS_ROW_S, ITERATION_S = 4e-5, 3.5e-8  # of work, for a row by simplex: once, and in each iteration
ROW_S, ENTRY_S = 1.6e-5, 4.1e-7  # by barrier, for a row once, and for an entry in each iteration
BARRIER_ROWS = 1500  # from which on the barrier method is faster, where blocks are alike
MADE_S = 2.5e-5  # of work, for a row of a program over counts that simplex solves, once
UNLIKE_MADE_S, UNLIKE_ITERATION_S = 2.3e-5, 2.2e-8  # the same where blocks are unlike: once, and in each iteration
INTEGER_S = 1.6e-4  # of work, for an iteration of a program that is solved in integers
GUARD_S, SLOWER = 60.0, 20.0  # how long, and how much slower than their work, programs may be on a machine that does
# other things, too: what is cut short here differs from run to run
WIDEST, WIDE, NARROW = 4.5, 2.5, 1.4  # the most stages over the fewest, of one relaxation: where devices can take each
# other's places; where they cannot, but blocks are unlike; where devices differ, but not blocks
IN_ORDER, MORE_RUNS = 9, 1.5  # the most numbers of stages that are bounded at once with the order of their blocks, and
# the most runs, short ones block by block, for each kind of block
ONE_BY_ONE = 5  # so few numbers of stages are bounded each, where blocks are unlike
COMMON = 0.5  # the largest stage is told apart where one kind has this share of all blocks
HELPS = 2e-3  # a share of a step: what telling the largest stage apart has to raise a bound by
FEW = 3000  # up to this number of partitions are tried rather than bounded
KEPT_S = 2e-4  # of work, for a device in `MostKept`
FIRST_GAP = 0.05  # what is proven first of one number of stages with the order of its blocks
FEWER = 0.5  # the most of the intervals that may be left where a relaxation is solved again
INTERVALS_S = 5e-8  # of work, for an interval of a stage
Residents = tuple[bool | None, ...]  # None: either


@dataclass(order=True)
class _Node:
    """Partitions into `fewest`, `fewest` + `step`, ... `count` stages, `number` of whose devices are resident, and
    whose stages with the most common blocks are `largest`. None: any."""

    bound_s: float
    residents: Residents = field(compare=False)
    fewest: int = field(compare=False)
    count: int = field(compare=False)
    step: int = field(compare=False, default=0)  # 0: 1, and no linear model has bounded it yet
    number: int | None = field(compare=False, default=None)
    largest: Largest | None = field(compare=False, default=None)
    ordered: bool = field(compare=False, default=False)  # bounded with the order of unlike blocks
    alike: bool = field(compare=False, default=False)  # whatever the largest stage, to programs over totals
    nodes: int = field(compare=False, default=COUNT_NODES)  # of the solver's tree, for one number of stages
    node_s: float = field(compare=False, default=0.0)  # of work, for each of these
    tried: int = field(compare=False, default=0)  # the number of these that did not reach the cutoff
    whole: bool = field(compare=False, default=False)  # whole numbers of blocks on each device bound it no better
    left: BlockIntervals | None = field(compare=False, default=None)  # of blocks, in partitions faster than `left_s`
    left_s: float = field(compare=False, default=0.0)
    solved: bool = field(compare=False, default=False)  # nothing bounds it better


def prove(search: Search, counts: Sequence[int], most_s: float, literal: bool = False) -> Proof:
    """Bound all partitions into `counts` stages (consecutive numbers) in `most_s` seconds of work; may improve
    `search.best`. `literal`: for the paper's own objective, which the linear programs do not bound."""
    p = search.problem
    closed_s = min(*(closed_form_s(p, count, literal) for count in counts), min(search.best.values())[0])
    closed = Proof(closed_s, "closed form")
    if literal:
        return closed
    try:
        import mip  # noqa: F401  (only to say what is missing)

        from .intervals import IntervalTables
        from .model import CountModel
        from .totals import TotalsModel
    except Exception as error:  # python-mip loads native libraries, which may fail in any way
        closed.trouble = f"the solver is missing ({type(error).__name__}: {error}); the local search's answer was taken"
        return closed
    tree = _Tree(search, CountModel, TotalsModel, most_s)
    tree.intervals = IntervalTables(tree.limits)
    try:
        with _collecting_between_models():
            lower_s = tree.run(_roots(p, counts))
    except Exception as error:  # whatever a solver raises, the local search has an answer
        closed.trouble = f"the solver failed ({type(error).__name__}: {error}); the local search's answer was taken"
        return closed
    lower_s = min(max(lower_s, closed_s), tree.best_s())
    return Proof(lower_s, tree.how(), "the proof ended where its work did" if tree.is_over() else "")


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


def _roots(p: MipProblem, counts: Sequence[int]) -> Iterator[_Node]:
    """All numbers of stages from N on in one node; fewer, which leave devices without a stage, in one each."""
    n = len(p.units)
    either: Residents = (False if p.swap else None,) * n
    for count in (count for count in counts if count < n):
        yield _Node(closed_form_s(p, count), either[:count] + (False,) * (n - count), count, count)
    low, high = max(n, min(counts)), max(counts)
    if low <= high:
        yield _Node(min(closed_form_s(p, count) for count in range(low, high + 1)), either, low, high)


class _Tree:
    intervals: Any

    def __init__(self, search: Search, model: Any, totals: Any, most_s: float):
        self.search, self.model, self.totals, self.most_s = search, model, totals, most_s
        self.work = WorkDone()
        self.limits = BlockLimits(search.problem)
        self.most_kept = MostKept(self.limits)
        self.rotates = rotates(search.problem)
        num_kinds = len(set(search.problem.kinds))
        self.in_order = self.limits.unlike and len(search.problem.short_runs()) <= MORE_RUNS * num_kinds
        self.counted = {
            "programs over totals": 0,
            "linear relaxations": 0,
            "programs over devices' totals": 0,
            "integer programs": 0,
            "partitions tried": 0,
        }

    def how(self) -> str:
        return " and ".join(f"{number} {what}" for what, number in self.counted.items() if number) or "closed form"

    def best_s(self) -> float:
        return min(self.search.best.values())[0]

    def run(self, roots: Iterator[_Node]) -> float:
        """The least bound over all nodes."""
        heap = list(roots)
        heapq.heapify(heap)
        while heap and heap[0].bound_s < self.best_s() * (1 - CLOSE) and not heap[0].solved and not self.is_over():
            node = heapq.heappop(heap)
            for finer in self.refine(node):
                heapq.heappush(heap, finer)
        return min(heap[0].bound_s if heap else math.inf, self.best_s())

    def is_over(self) -> bool:
        return self.work.seconds > self.most_s

    def refine(self, node: _Node) -> list[_Node]:
        n = len(self.search.problem.units)
        either = None in node.residents
        number_first = not either or (self.rotates and node.number is not None)
        if not node.step and number_first:
            if node.largest is None and not node.alike and (self.rotates or not self.limits.unlike):
                return self.refine_largest(node)
            if node.count >= self.widest() * node.fewest > 1:
                middle = math.isqrt(node.fewest * node.count)  # small models bound few stages
                parts = [(node.fewest, middle), (middle + 1, node.count)]
                return [self.total(replace(node, fewest=low, count=high)) for low, high in parts]
        if either:
            return self.refine_residents(node)
        if not node.step:
            step = 1 if self.rotates and node.fewest >= n else n
            tops = range(node.count, max(node.count - step, node.fewest - 1), -1)
            each = [self.restrict(node, top - (top - node.fewest) // step * step, top, step) for top in tops]
            return [self.narrow(part) if self.begins_in_order(part) else self.relax(part) for part in each]
        if self.limits.unlike and node.fewest == node.count and node.left_s < self.cutoff_s(node):
            return [self.narrow(node)]
        if node.largest is None and self.largest() == 1:
            return self.relax_largest(node)
        if node.fewest == node.count:
            return [self.solve(node) if node.whole or not self.limits.unlike else self.whole_of(node)]
        numbers = range(node.fewest, node.count + 1, node.step)
        middle = numbers[(len(numbers) - 1) // 2]
        parts = [(node.fewest, middle), (middle + node.step, node.count)]
        if self.limits.unlike and len(numbers) <= ONE_BY_ONE:
            parts = [(number, number) for number in numbers]
        finer = [self.restrict(node, low, high, node.step) for low, high in parts]
        if self.limits.unlike:  # what is one number of stages is bounded with the order of its blocks next
            return [part if part.fewest == part.count else self.relax(part) for part in finer]
        return [self.relax(part) for part in finer]

    def begins_in_order(self, node: _Node) -> bool:
        """Whether several numbers of stages are bounded with the order of their blocks at once. Where all devices are
        resident, nothing waits for transfers, and a relaxation without it says hardly more than totals do."""
        numbers = range(node.fewest, node.count + 1, node.step)
        return self.in_order and all(node.residents) and len(numbers) <= IN_ORDER

    def widest(self) -> float:
        return WIDEST if self.rotates else WIDE if self.limits.unlike else NARROW

    def restrict(self, node: _Node, fewest: int, count: int, step: int) -> _Node:
        """The node's partitions into these numbers of stages. Where devices can take each other's places in turn, and
        the node speaks of all numbers of stages, the device of the last stage stays the same."""
        turned = (node.count - count) % len(node.residents) if step == 1 else 0
        stays = node.residents[turned:] + node.residents[:turned]
        return replace(node, fewest=fewest, count=count, step=step, residents=stays, left=None, left_s=0.0)

    def refine_residents(self, node: _Node) -> list[_Node]:
        """By their number, then device by device."""
        either = [d for d, stays in enumerate(node.residents) if stays is None]
        known = sum(stays is True for stays in node.residents)
        if node.number is None:
            return [self.total(replace(node, number=known + more)) for more in range(len(either) + 1)]
        missing = node.number - known
        if self.rotates and node.fewest >= len(node.residents) and 0 < missing < len(either):
            chosen = itertools.combinations(either, missing)
            stays = [tuple(d in which or s is True for d, s in enumerate(node.residents)) for which in chosen]
            return self.bound_by_turns([self.total(replace(node, residents=each)) for each in stays])
        if missing in (0, len(either)):
            known_all = tuple(missing > 0 if stays is None else stays for stays in node.residents)
            return [self.total(replace(node, residents=known_all), TOTALS_NODES)]
        d = either[0]
        choices = [(*node.residents[:d], stays, *node.residents[d + 1 :]) for stays in (True, False)]
        return [self.total(replace(node, residents=choice)) for choice in choices]

    @staticmethod
    def bound_by_turns(nodes: list[_Node]) -> list[_Node]:
        """Bound the nodes of all choices of resident devices, each by the least bound of its rotations: with another
        number of stages another device has the last one (`restrict`), so a choice equals a rotated one."""
        bounds = {node.residents: node.bound_s for node in nodes}
        for node in nodes:
            stays = node.residents
            node.bound_s = min(bounds[stays[turn:] + stays[:turn]] for turn in range(len(stays)))
        return nodes

    def refine_largest(self, node: _Node) -> list[_Node]:
        """Parts of the node, where programs over totals bound them better: its largest stage has fewer common blocks
        than that of the best partition, equally many, or more; and one of these runs its forward again, or none."""
        parts = [self.total(part) for part in self.split_by_largest(node)]
        if min((part.bound_s for part in parts), default=0.0) < node.bound_s + HELPS * self.best_s():
            return [replace(node, alike=True)]
        return [self.few(part) for part in parts]

    def relax_largest(self, node: _Node) -> list[_Node]:
        """The same parts, bounded by the linear model."""
        parts = [self.few(part) for part in self.split_by_largest(node)]
        parts = [part if part.bound_s == math.inf else self.relax(part) for part in parts]
        return parts or [replace(node, largest=ANY_LARGEST)]

    def split_by_largest(self, node: _Node) -> Iterator[_Node]:
        at, num_common = self.largest(), self.limits.num_common
        if num_common < COMMON * self.search.problem.num_blocks or not at:
            return
        for low, high in ((at + 1, None), (at, at), (1, at - 1)):
            fewest = max(node.fewest, -(-num_common // high) if high else 0)
            fewest += (node.count - fewest) % max(1, node.step)
            if high == 0 or fewest > node.count:
                continue
            for reruns in (True, False) if high is None or low == high else (None,):
                yield replace(node, fewest=fewest, largest=Largest(low, high, reruns), left=None, left_s=0.0)

    def largest(self) -> int:
        """The number of common blocks in the best partition's largest stage."""
        cuts = min(self.search.best.values())[1]
        return max(self.search.problem.kinds[a:b].count(self.limits.common) for a, b in itertools.pairwise(cuts))

    def few(self, node: _Node) -> _Node:
        """Try all partitions of the node if they are few."""
        most = node.largest.most if node.largest else None
        if most is not None and (all_cuts := few_partitions(self.search.problem, most, self.limits.common)):
            for cuts in all_cuts:
                if node.fewest <= len(cuts) - 1 <= node.count and cuts not in self.search.known:
                    self.search.seconds(cuts)
                    self.work.add(self.search.work_s(cuts))
            self.counted["partitions tried"] += len(all_cuts)
            self.raise_bound(node, math.inf)
        return node

    def total(self, node: _Node, nodes: int = 0) -> _Node:
        """Bound all partitions of the node by what each device holds in all: in whole blocks where the solver may have
        nodes of its own."""
        import mip

        if self.is_over():
            return node
        gc.collect(0)  # the model before
        numbers = (node.fewest, node.count, node.residents, node.number)
        anywhere = self.rotates and node.number is not None and all(stays is None for stays in node.residents)
        cutoff_s = self.best_s() * (1 - CLOSE)
        if self.is_empty(node, cutoff_s):
            return node
        kept = self.num_kept(node, cutoff_s)
        model = self.totals(self.limits, *numbers, anywhere, node.largest or ANY_LARGEST, kept).model
        model.max_mip_gap = CLOSE / 4
        status = self.optimize(model, nodes)
        self.counted["programs over totals"] += 1
        bound_s = model.objective_bound if nodes else model.objective_value
        most_s = math.inf if kept == math.inf else cutoff_s  # with `kept` it speaks of faster ones than the cutoff
        if status == mip.OptimizationStatus.INFEASIBLE:
            self.raise_bound(node, most_s)
        elif bound_s is not None and math.isfinite(bound_s):
            self.raise_bound(node, min(bound_s, most_s))
        return node

    def num_kept(self, node: _Node, cutoff_s: float) -> float:
        """The most common blocks that keep their saved tensors in partitions of the node that are faster than the
        cutoff. Infinite, so not known, where blocks are unlike or a device swaps: then other things take longer."""
        n, stays = len(node.residents), node.residents
        if self.limits.unlike or False in stays or (None in stays and node.number != n):
            return math.inf
        before, numbers = self.most_kept.computed, range(node.fewest, node.count + 1, node.step or 1)
        largest = node.largest or ANY_LARGEST
        kept = max(self.most_kept.of(count, largest, cutoff_s) for count in numbers)
        self.work.add((self.most_kept.computed - before) * n * KEPT_S)
        return kept

    def is_empty(self, node: _Node, cutoff_s: float) -> bool:
        """Whether no partition of the node is faster than the cutoff, by how many blocks keep their saved tensors."""
        if self.num_kept(node, cutoff_s) > NONE:
            return False
        self.raise_bound(node, cutoff_s)
        return True

    def guard_s(self) -> float:
        """Seconds that one program never takes, but where it is far slower than its work says."""
        return max(GUARD_S, SLOWER * (self.most_s - self.work.seconds))

    def optimize(self, model: Any, nodes: int, trials: bool = True) -> Any:
        """Solve an integer program with at most `nodes` nodes, or its relaxation with none."""
        more: dict[str, Any] = {"max_nodes": nodes} if nodes else {"relax": True}
        if not trials:
            forbid_trials(model)
        status = model.optimize(max_seconds=self.guard_s(), **more)
        iterations = model.solver._get_int_info_value("simplex_iteration_count")
        self.work.add(model.num_rows * TOTALS_ROW_S)
        self.work.add(iterations * (INTEGER_S if nodes else model.num_rows * ITERATION_S))
        return status

    def linear(self, model: Any) -> Any:
        """Solve a relaxation: by dual simplex, or the barrier method, which is faster on the largest of these."""
        import mip

        simplex = self.limits.unlike or model.num_rows < BARRIER_ROWS
        model.lp_method = mip.LP_Method.DUAL if simplex else mip.LP_Method.BARRIER
        status = model.optimize(relax=True, max_seconds=self.guard_s())
        iterations = model.solver._get_int_info_value("simplex_iteration_count" if simplex else "ipm_iteration_count")
        unlike = self.limits.unlike
        made_s, iteration_s = (UNLIKE_MADE_S, UNLIKE_ITERATION_S) if unlike else (MADE_S, ITERATION_S)
        self.work.add(model.num_rows * (made_s if simplex else ROW_S))
        self.work.add(iterations * (model.num_rows * iteration_s if simplex else model.num_nz * ENTRY_S))
        return status

    def cutoff_s(self, node: _Node) -> float:
        """The next cutoff in one number of stages: find a step faster than this. There is none, or the node's bound
        rises to the fastest one."""
        bounds = (self.best_s() * (1 - gap) for gap in GAPS)
        return next((bound_s for bound_s in bounds if bound_s > node.bound_s * (1 + 1e-6)), self.best_s())

    def relax(self, node: _Node) -> _Node:
        """Bound by the linear model."""
        import mip

        if self.is_over():
            return node
        gc.collect(0)  # the model before
        cutoff_s = self.best_s() * (1 - CLOSE)
        if self.is_empty(node, cutoff_s):
            return node
        counted = self.counts(node, cutoff_s)
        status = self.linear(counted.model)
        self.counted["linear relaxations"] += 1
        if status == mip.OptimizationStatus.OPTIMAL:
            self.raise_bound(node, min(counted.model.objective_value, cutoff_s))
            if self.limits.unlike:
                self.raise_bound(node, min(self.intervals.bound_s(counted), cutoff_s))
                self.work.add(INTERVALS_S * node.count * self.search.problem.num_blocks**2)
        elif status == mip.OptimizationStatus.INFEASIBLE:
            self.raise_bound(node, cutoff_s)
        return node

    def narrow(self, node: _Node) -> _Node:
        """Bound by the relaxation with the order of the blocks, and again without the intervals that no partition
        faster than a cutoff has, as long as these are many."""
        import mip

        cutoff_s = max(self.cutoff_s(node), self.best_s() * (1 - FIRST_GAP))
        faster_s = max(cutoff_s, self.best_s() * (1 - CLOSE))  # the first one may prove more
        node.ordered, node.left, node.left_s = True, None, cutoff_s
        before = math.inf
        while node.bound_s < cutoff_s and not self.is_over():
            gc.collect(0)  # the model before
            if self.is_empty(node, faster_s):
                break
            counted = self.counts(node, faster_s)
            status = self.linear(counted.model)
            self.counted["linear relaxations"] += 1
            if status == mip.OptimizationStatus.INFEASIBLE:
                self.raise_bound(node, faster_s)
            if status != mip.OptimizationStatus.OPTIMAL:
                break
            through = self.intervals.least_through(counted)
            self.work.add(INTERVALS_S * node.count * self.search.problem.num_blocks**2)
            through_s = max(float(seconds.min()) for seconds in through)  # equal but for rounding
            self.raise_bound(node, min(through_s, faster_s))
            node.left, faster_s = [seconds < cutoff_s for seconds in through], cutoff_s
            before = min(before, sum(int(np.isfinite(seconds).sum()) for seconds in through))
            now = sum(int(some.sum()) for some in node.left)
            if now > FEWER * before:
                break
            before = now
        return node

    def whole_of(self, node: _Node) -> _Node:
        """Bound one number of stages by the relaxation with a whole number of blocks on each device."""
        import mip

        gc.collect(0)  # the model before
        cutoff_s = self.cutoff_s(node)
        if self.is_empty(node, cutoff_s):
            return node
        counted = self.counts(node, cutoff_s, whole=True)
        counted.row(cutoff_s, counted.end)
        status = self.optimize(counted.model, WHOLE_NODES)
        self.counted["programs over devices' totals"] += 1
        if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
            self.raise_bound(node, cutoff_s)
        elif (bound_s := counted.model.objective_bound) is not None and math.isfinite(bound_s):
            self.raise_bound(node, min(bound_s, cutoff_s))
        node.whole = node.bound_s < cutoff_s
        return node

    def solve(self, node: _Node) -> _Node:
        """Look for integer counts faster than the cutoff: the node's bound rises, and the search climbs from them."""
        import mip

        gc.collect(0)  # the model before
        begin_s, nodes = self.work.seconds, node.nodes
        if node.node_s:
            nodes = max(1, min(nodes, int((self.most_s - begin_s) / node.node_s)))  # as the work left allows
        if nodes <= node.tried:
            node.solved = True
            return node
        cutoff_s = self.cutoff_s(node)
        if self.is_empty(node, cutoff_s):
            return node
        counted = self.counts(node, cutoff_s, integer=True)
        counted.row(cutoff_s, counted.end)
        counted.model.max_mip_gap = CLOSE / 4
        status = self.optimize(counted.model, nodes, trials=False)
        self.counted["integer programs"] += 1
        node.node_s, node.tried = (self.work.seconds - begin_s) / nodes, 0
        if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
            self.raise_bound(node, cutoff_s)
            return node
        node.solved = status == mip.OptimizationStatus.OPTIMAL
        node.nodes *= MORE_NODES
        bound_s = counted.model.objective_bound
        if bound_s is not None and math.isfinite(bound_s):
            self.raise_bound(node, min(bound_s, cutoff_s))
        node.tried = nodes if node.bound_s < cutoff_s else 0
        if counted.model.num_solutions and counted.ordered:
            cuts = counted.cuts()
            if all(a < b for a, b in itertools.pairwise(cuts)) and cuts[-1] == self.search.problem.num_blocks:
                self.search.climb(cuts, {node.count})
        return node

    def counts(self, node: _Node, cutoff_s: float, integer: bool = False, whole: bool = False) -> Any:
        kept = self.num_kept(node, cutoff_s)
        more = {"largest": node.largest or ANY_LARGEST, "ordered": node.ordered, "whole": whole, "kept": kept}
        if cutoff_s <= node.left_s:
            more["left"] = node.left
        return self.model(
            self.limits, node.count, node.residents, integer, fewest=node.fewest, cutoff_s=cutoff_s, **more
        )

    @staticmethod
    def raise_bound(node: _Node, bound_s: float) -> None:
        node.bound_s = max(node.bound_s, bound_s)


def forbid_trials(model: Any) -> None:
    """Keep the solver from searching smaller programs for solutions, which the local search has, and from trying where
    to branch: in one node they may take a hundred times as long as its relaxation."""
    solver = model.solver
    solver._set_int_option_value("mip_pscost_minreliable", 0)
    for what in ("rins", "rens", "root_reduced_cost"):  # a solver without such an option has no such search
        solver._lib.Highs_setBoolOptionValue(solver._model, f"mip_heuristic_run_{what}".encode(), 0)


def rotates(p: MipProblem) -> bool:
    """Whether nothing changes when each device takes the place of the one before it."""
    n = len(p.units)
    alike = len({replace(unit, complex=0) for unit in p.units}) == 1
    alike = alike and all(row == rows[0] for rows in (p.forward_s, p.backward_s, p.again_s) for row in rows)
    shared = [[a.complex == b.complex for b in p.units] for a in p.units]
    return alike and all(
        table[d - 1][e - 1] == table[d][e]
        for table in (shared, p.message_s, p.message_latency_s, p.message_shares)
        for d in range(n)
        for e in range(n)
    )


def few_partitions(p: MipProblem, most: int, kind: int) -> list[Cuts]:
    """All partitions with at most `most` blocks of a kind per stage; none where there are more than `FEW`."""
    length = p.num_blocks
    passed = [0, *itertools.accumulate(k == kind for k in p.kinds)]
    starts = [[a for a in range(b) if passed[b] - passed[a] <= most] for b in range(length + 1)]
    ways = [1]
    for b in range(1, length + 1):
        ways.append(sum(ways[a] for a in starts[b]))
    if ways[length] > FEW:
        return []
    found: list[list[Cuts]] = [[(0,)]]
    for b in range(1, length + 1):
        found.append([(*cuts, b) for a in starts[b] for cuts in found[a]])
    return found[length]
