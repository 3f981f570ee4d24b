"""Good partitions by local search: several starts for every number of stages, then small moves while they help.

In: a `MipProblem` and an objective over cut positions (inf: does not fit). Out: the best partition found per number of
stages. Starts: equal numbers of blocks with the larger stages first or last, equal times and equal weights in
proportion to the stages' devices, and some devices with no more than can stay on them. Moves: a cut one block to either
side, a block handed on over several stages, a block more in each stage of a round and one less in each of another
round, a stage cut in two, two stages joined. One start alone can be several times slower than the best; that is why
there are many, and why the best starts of many numbers of stages are followed. Where no move helps, the way to a better
partition may lead over a worse one: the last evaluations go to the moves from the best partitions whose moves have not
all been tried. Then the search restarts from the best partitions of several numbers of stages, and follows random
moves, also such that cost a little, less and less of it (annealing).
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from ..work import WorkDone
from .problem import MipProblem
from .recurrence import num_fetched

Cuts = tuple[int, ...]
Objective = Callable[[MipProblem, Sequence[int]], float]
RESIDENT_PART = 0.85  # the share of a resident device's memory for weights, gradients and states
FOLLOWED = 10  # the most best starts that are improved, each for another number of stages
COLD, WARM = 0.006, 0.015  # the share of a step by which a move may be slower, on average, at first
COLD_RESTARTS, WARM_RESTARTS = 4, 6
COLD_MOVES, WARM_MOVES = 600, 60  # random moves tried after a restart: in all; for every block
CYCLES = 4  # of all these restarts
MOVED = (0.5, 0.3, 0.1, 0.05, 0.05)  # how often a random move is of each kind: see `random_move`
STAGE_S, FETCHED_S = 8e-6, 1e-5  # of work, for a stage of a partition that is evaluated; for one that is fetched, too
REFUSED_S = 2e-5  # of work, for a partition that does not fit
WIDENED = 200  # partitions evaluated where no move helps: about 1% of a search for 96 layers on 8 devices


class Search:
    """`best`: (seconds, cuts) by number of stages. Stops after `most_s` of work (`passes/work.py`) or when nothing
    helps."""

    def __init__(self, problem: MipProblem, objective: Objective, most_s: float = math.inf):
        self.problem, self.objective, self.most_s = problem, objective, most_s
        self.work = WorkDone()
        self.known: dict[Cuts, float] = {}
        self.best: dict[int, tuple[float, Cuts]] = {}

    def run(self, counts: Sequence[int]) -> tuple[float, Cuts] | None:
        """The best partition into one of these numbers of stages; None where none was found that fits."""
        for count in counts:
            for cuts in starts(self.problem, count):
                self.seconds(cuts)
            if self.is_late() and self.best:
                break
        order = sorted(self.best.values())
        for _, cuts in order[:FOLLOWED]:
            self.climb(cuts, set(counts))
        self.widen(set(counts))
        self.restart(set(counts))
        return min(self.best.values(), default=None)

    def run_all(self, counts: Sequence[int]) -> tuple[float, Cuts] | None:
        """The best of all partitions into one of these numbers of stages."""
        length = self.problem.num_blocks
        for count in counts:
            for inner in itertools.combinations(range(1, length), count - 1):
                self.seconds((0, *inner, length))
                if self.is_late():
                    break
        return min(self.best.values(), default=None)

    def is_late(self) -> bool:
        return self.work.seconds > self.most_s

    def seconds(self, cuts: Cuts) -> float:
        found = self.known.get(cuts)
        if found is None:
            found = self.known[cuts] = self.objective(self.problem, cuts)
            self.work.add(self.work_s(cuts))
            count = len(cuts) - 1
            if found < math.inf and (count not in self.best or (found, cuts) < self.best[count]):
                self.best[count] = (found, cuts)
        return found

    def work_s(self, cuts: Cuts) -> float:
        """Seconds of work of the evaluation of a partition that is known."""
        if self.known[cuts] == math.inf:
            return REFUSED_S
        return STAGE_S * len(cuts) + FETCHED_S * num_fetched(self.problem, cuts)

    def climb(self, cuts: Cuts, counts: set[int]) -> None:
        """Take every move that helps and continue with the moves after it, until none helps."""
        now_s = self.seconds(cuts)
        near = list(self.moves(cuts, counts))
        at = missed = 0
        while missed < len(near) and not self.is_late():
            tried = near[at % len(near)]
            at, missed = at + 1, missed + 1
            took_s = self.seconds(tried)
            if took_s < now_s * (1 - 1e-9):
                cuts, now_s, missed = tried, took_s, 0
                near = list(self.moves(cuts, counts))

    def widen(self, counts: set[int]) -> None:
        """Try `WIDENED` moves from the best partitions known, whether they help or not."""
        limit = len(self.known) + WIDENED
        waiting = [(seconds, cuts) for cuts, seconds in self.known.items() if seconds < math.inf]
        heapq.heapify(waiting)
        while waiting and not self.is_late():
            for tried in self.moves(heapq.heappop(waiting)[1], counts):
                if tried in self.known:
                    continue
                if len(self.known) == limit:
                    return
                if self.seconds(tried) < math.inf:
                    heapq.heappush(waiting, (self.known[tried], tried))

    def restart(self, counts: set[int]) -> None:
        """Anneal from some of the best numbers of stages in turn, each time from the best partition known into that
        number, and climb from what was found: first near it, then farther away."""
        draw = random.Random(0)
        cold = (COLD, COLD_RESTARTS, COLD_MOVES)
        warm = (WARM, WARM_RESTARTS, WARM_MOVES * self.problem.num_blocks)
        for warmth, restarts, moves in (cold, warm) * CYCLES:
            for count in sorted(self.best, key=self.best.__getitem__)[:restarts]:
                found = self.anneal(self.best[count], counts, draw, warmth, moves)
                if self.is_late():
                    return
                self.climb(found, counts)

    def anneal(
        self, start: tuple[float, Cuts], counts: set[int], draw: random.Random, warmth: float, moves: int
    ) -> Cuts:
        """The best of the partitions on a way of random moves, of which ever fewer may cost something."""
        (start_s, cuts), found = start, start
        now_s = start_s
        for step in range(moves):
            if self.is_late():
                break
            tried = self.random_move(cuts, counts, draw)
            if tried is None:
                continue
            took_s = self.seconds(tried)
            cost = warmth * start_s * (1 - step / moves) ** 2
            if took_s <= now_s - cost * math.log(1 - draw.random()):
                cuts, now_s = tried, took_s
                found = min(found, (now_s, cuts))
        return found[1]

    def random_move(self, cuts: Cuts, counts: set[int], draw: random.Random) -> Cuts | None:
        """One cut, or several neighbours, moved by a block; a cut taken away, a new one, or both; None where the drawn
        move is not possible."""
        last, what = len(cuts) - 1, draw.choices(("one", "several", "elsewhere", "joined", "cut"), MOVED)[0]
        if what in ("one", "several") and last > 1:
            i, step = draw.randrange(1, last), draw.choice((1, -1))
            k = min(last, i + (draw.randrange(1, 2 * len(self.problem.units) + 1) if what == "several" else 1))
            moved = (*cuts[:i], *(c + step for c in cuts[i:k]), *cuts[k:])
        else:
            inner = list(cuts[1:-1])
            if what in ("elsewhere", "joined") and inner:
                inner.pop(draw.randrange(len(inner)))
            if what in ("elsewhere", "cut"):
                inner.append(draw.randrange(1, self.problem.num_blocks))
            moved = (0, *sorted(inner), self.problem.num_blocks)
        fits = len(moved) - 1 in counts and all(a < b for a, b in itertools.pairwise(moved))
        return moved if fits else None

    def moves(self, cuts: Cuts, counts: set[int]) -> Iterator[Cuts]:
        last = len(cuts) - 1
        for i in range(1, last):
            for step in (1, -1):
                if cuts[i - 1] < cuts[i] + step < cuts[i + 1]:
                    yield (*cuts[:i], cuts[i] + step, *cuts[i + 1 :])
        for i in range(1, last - 1):  # hand a block on over several stages: all cuts between move
            for k in range(i + 2, min(last, i + 1 + len(self.problem.units)) + 1):
                for step in (1, -1):
                    moved = tuple(c + step for c in cuts[i:k])
                    if cuts[i - 1] < moved[0] and moved[-1] < cuts[k]:
                        yield (*cuts[:i], *moved, *cuts[k:])
        rounds = range(last % len(self.problem.units), last, len(self.problem.units))
        for grown, shrunk in itertools.permutations(rounds, 2):
            larger = round_moved(cuts, grown, shrunk, len(self.problem.units))
            if larger is not None:
                yield larger
        if last - 1 in counts:
            for i in range(1, last):
                yield (*cuts[:i], *cuts[i + 1 :])
        if last + 1 in counts:
            for i in range(1, last + 1):
                if cuts[i] - cuts[i - 1] > 1:
                    yield (*cuts[:i], (cuts[i - 1] + cuts[i]) // 2, *cuts[i:])


def round_moved(cuts: Cuts, grown: int, shrunk: int, width: int) -> Cuts | None:
    """Each of `width` stages from `grown` on with one more block, and each from `shrunk` on with one less."""
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    if abs(grown - shrunk) < width or max(grown, shrunk) + width > len(sizes):
        return None
    for i in range(width):
        sizes[grown + i] += 1
        sizes[shrunk + i] -= 1
    return (0, *itertools.accumulate(sizes)) if min(sizes) > 0 else None


def starts(problem: MipProblem, count: int) -> list[Cuts]:
    """Different first partitions into `count` stages."""
    p, length, n = problem, problem.num_blocks, len(problem.units)
    blocks = [float(i) for i in range(length + 1)]
    seconds = [sum(f + b for f, b in zip(column[0], column[1])) for column in _columns(p)]
    rates = [1.0 / (p.forward_s[d][-1] + p.backward_s[d][-1]) for d in range(n)]
    rooms = [unit.budget_bytes for unit in p.units]
    per_block = _cut(blocks, [1.0] * count)
    return list(
        dict.fromkeys(
            (
                per_block,
                tuple(length - c for c in reversed(per_block)),
                _cut(seconds, [rates[j % n] for j in range(count)]),
                _cut(p.weight_bytes, [rooms[j % n] for j in range(count)]),
                *(_cut(p.weight_bytes, shares) for shares in resident_shares(p, count)),
            )
        )
    )


def resident_shares(p: MipProblem, count: int) -> list[list[float]]:
    """Weights per stage where some devices, evenly spread, hold no more than can stay on them, and others the rest."""
    n = len(p.units)
    whole = p.weight_bytes[-1]
    lasting = whole + p.grad_bytes[-1] + p.update.state_bytes * p.params[-1]
    found = []
    for number in range(1, n if count > n and whole else 1):
        stays = [(d + 1) * number // n > d * number // n for d in range(n)]
        on = [len(range(d, count, n)) for d in range(n)]
        most = [RESIDENT_PART * p.units[d].budget_bytes * whole / lasting for d in range(n)]
        rest = whole - sum(most[d] for d in range(n) if stays[d])
        others = sum(on[d] for d in range(n) if not stays[d])
        if rest > 0:
            found.append([most[d] / on[d] if stays[d] else rest / others for d in (j % n for j in range(count))])
    return found


def _columns(p: MipProblem) -> list[tuple[list[float], list[float]]]:
    return [([f[i] for f in p.forward_s], [b[i] for b in p.backward_s]) for i in range(p.num_blocks + 1)]


def _cut(sums: Sequence[float], shares: Sequence[float]) -> Cuts:
    """Cuts where the running sums pass each stage's share of the whole, with at least one block a stage."""
    count, length = len(shares), len(sums) - 1
    whole, passed = sum(shares), 0.0
    cuts = [0]
    for j, share in enumerate(shares[:-1]):
        passed += share
        target = sums[-1] * passed / whole
        at = bisect_left(sums, target)
        if at and target - sums[at - 1] < sums[min(at, length)] - target:
            at -= 1
        cuts.append(min(max(at, cuts[-1] + 1), length - (count - 1 - j)))
    return (*cuts, length)
