"""Good partitions by local search: several starts for every number of stages, random moves, then those that help.

In: a `MipProblem` and an objective over cut positions (inf: does not fit). Out: the best partition found per number of
stages. Of most partitions only a lower bound is taken, of many at once (`least_times`); the objective is evaluated
where it could be faster than what is known.

Each turn of the search is for one number of stages. It begins from the best partition known, at first from other
starts, too, and from partitions like the best ones into other numbers of stages (`starts`). Several chains follow
random moves (`random_moves`), also such that cost a little, less and less of it (annealing). From the best of them the
search climbs by all moves: a cut one block to either side, a block handed on over several stages, a block more in each
stage of a round and one less in each of another round, a stage cut in two, two stages joined. Half of the time goes to
first turns, of the best starts. The next turn of the others is for the number of stages that may become the fastest:
its best partition, less what turns as late as its next one have saved so far. Chains of equal blocks on equal devices,
whose best partitions are near a start, end after a few turns that save nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..work_limit import WorkDone
from .least_times import LeastTimes, bytes_of_rows
from .problem import MipProblem
from .random_moves import RandomMoves
from .recurrence import contended_s, num_fetched
from .starts import Cuts, is_chain, like, starts, two_sizes

Objective = Callable[[MipProblem, Sequence[int]], float]
STEPS = (50, 120, 200, 300, 400)  # of the chains of the first turn of a number of stages, the second, and on
WARMTH = (0.005, 0.01, 0.015)  # the share of a step by which a move may be slower, on average, at first; in turn
CHAINS, DRAWN = 8, 8  # in a turn; moves drawn in a step of a chain, of which it takes the first that it may
FIRST_SHARE = 0.5  # of the time for turns, for first ones
DEARER = 0.003  # a share of a step, for each stage: first turns of many stages take longer
SAVED = (0.015, 0.006, 0.002, 0.001, 0.0005)  # the share of a step that the second turn, the third, ... saves, as
SAVED_BEFORE = 2  # if this number of turns had done so before
HOPE = 1.0  # times as much is hoped for
HOPELESS = 5e-4  # a share of a step not worth a turn
MOST_TURNS = 12  # for one number of stages
IDLE_TURNS = 4  # in a row that save nothing: then a chain of equal blocks on equal devices is not searched further
SEEDS, NEAR_BEST = 9, 1.1  # starts of the first turn: the most, and how much slower than the best of them at most
LIKE = 2  # the best other numbers of stages that a turn imitates
JUDGED = 4  # the most ends of chains that are evaluated
CLIMBED = 12  # the most moves that are evaluated before a climb ends
ALL = 1000  # up to this number of partitions into one number of stages are tried rather than searched
STAGE_S, FETCHED_S = 8e-6, 1e-5  # of work, for a stage of a partition that is evaluated; for one that is fetched, too
REFUSED_S = 2e-5  # of work, for a partition that does not fit
BATCH_S = 5e-4  # of work, for partitions that are bounded at once
BATCH_STAGE_S, ROW_STAGE_S = 1.6e-5, 3.8e-7  # for each of their stages, and for it in each of them
STEP_S = 3e-4  # for moves of all chains


@dataclass
class Proof:
    """`lower_s`: no partition is faster. `trouble`: what went wrong with the solver."""

    lower_s: float
    how: str
    trouble: str = ""


class Turns:
    """Choose whose turn it is: `taken` by number of stages."""

    def __init__(self, best: dict[int, tuple[float, Cuts]]):
        self.best, self.taken = best, Counter[int]()
        self.saved = [(share * SAVED_BEFORE, SAVED_BEFORE) for share in SAVED]  # in all, and by how many turns
        self.first_s = self.whole_s = 0.0  # of work

    def took(self, count: int, saved: float, work_s: float) -> None:
        """A turn saved this share of a step."""
        self.whole_s += work_s
        if self.taken[count]:
            late = self.lateness(count)
            share, number = self.saved[late]
            self.saved[late] = (share + saved, number + 1)
        else:
            self.first_s += work_s
        self.taken[count] += 1

    def lateness(self, count: int) -> int:
        return min(self.taken[count], len(SAVED)) - 1

    def hoped_s(self, count: int) -> float:
        share, number = self.saved[self.lateness(count)]
        return self.best[count][0] * (1 - HOPE * share / number)

    def next(self) -> int:
        """The number of stages that may become the fastest; or the fastest one without a turn, for half of the time; 0
        where no turn is worth while."""
        untaken = [c for c in self.best if not self.taken[c]]
        new = min(untaken, key=lambda count: self.best[count][0] * (1 + DEARER * count), default=0)
        again = min((c for c in self.best if 0 < self.taken[c] < MOST_TURNS), key=self.hoped_s, default=0)
        if again and self.hoped_s(again) > min(self.best.values())[0] * (1 - HOPELESS):
            again = 0
        return new if new and (not again or self.first_s <= FIRST_SHARE * self.whole_s) else again


class Search:
    """`best`: (seconds, cuts) by number of stages. Stops after `most_s` of work (`passes/work_limit.py`) or when
    nothing helps."""

    def __init__(self, problem: MipProblem, objective: Objective, most_s: float = math.inf):
        self.problem, self.objective, self.most_s = problem, objective, most_s
        self.bound = LeastTimes(problem) if objective is contended_s else None
        self.draw = RandomMoves(problem)
        self.work = WorkDone()
        self.known: dict[Cuts, float] = {}
        self.least: dict[bytes, float] = {}  # lower bounds, by cuts
        self.best: dict[int, tuple[float, Cuts]] = {}
        self.seeds: dict[int, list[Cuts]] = {}
        self.climbed: set[Cuts] = set()

    def run(self, counts: Sequence[int]) -> tuple[float, Cuts] | None:
        """The best partition into one of these numbers of stages; None where none was found that fits."""
        turns = Turns(self.best)
        for count in counts:
            if math.comb(self.problem.num_blocks - 1, count - 1) <= ALL:
                self.try_all(count)
                turns.taken[count] = MOST_TURNS
            else:
                self.begin(count)
            if self.is_late() and self.best:
                break
        most_idle, idle = IDLE_TURNS if is_chain(self.problem) else math.inf, 0
        while not self.is_late() and idle < most_idle and (count := turns.next()):
            before_s, begin_s, best_s = self.best[count][0], self.work.seconds, self.best_s
            self.turn(count, turns.taken[count], set(counts))
            turns.took(count, 1 - self.best[count][0] / before_s, self.work.seconds - begin_s)
            idle = 0 if self.best_s < (1 - HOPELESS) * best_s else idle + 1
        return min(self.best.values(), default=None)

    def run_all(self, counts: Sequence[int]) -> tuple[float, Cuts] | None:
        """The best of all partitions into one of these numbers of stages."""
        for count in counts:
            for cuts in self.all_of(count):
                self.seconds(cuts)
                if self.is_late():
                    break
        return min(self.best.values(), default=None)

    @property
    def best_s(self) -> float:
        return min(self.best.values())[0]

    def all_of(self, count: int) -> Iterator[Cuts]:
        length = self.problem.num_blocks
        return ((0, *inner, length) for inner in itertools.combinations(range(1, length), count - 1))

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

    def least_s(self, rows: Sequence[Cuts] | NDArray[np.int64]) -> NDArray[np.float64]:
        """A lower bound of the seconds of each of these partitions into one number of stages."""
        if self.bound is None:
            return np.array([self.seconds(tuple(map(int, row))) for row in rows])
        self.work.add(BATCH_S + (len(rows[0]) - 1) * (BATCH_STAGE_S + ROW_STAGE_S * len(rows)))
        cuts = np.asarray(rows)
        keys = bytes_of_rows(cuts)
        new = {key: i for i, key in enumerate(keys) if key not in self.least}  # moves come back to the same partitions
        if new:
            self.least.update(zip(new, self.bound(cuts[list(new.values())]).tolist()))
        return np.array([self.least[key] for key in keys])

    def try_all(self, count: int) -> None:
        rows = list(self.all_of(count))
        least_s = self.least_s(rows)
        for i in map(int, np.argsort(least_s, kind="stable")):
            if least_s[i] < self.best.get(count, (math.inf,))[0]:
                self.seconds(rows[i])

    def begin(self, count: int) -> None:
        rows, alike = starts(self.problem, count), two_sizes(self.problem, count)
        least_s, number = self.least_s(rows + alike), len(rows)
        best = int(np.argmin(least_s))
        if best >= number:  # of those in two sizes, which differ little, the best one where it is the best of all
            rows.append(alike[best - number])
        least_s = np.append(least_s[:number], least_s[best])[: len(rows)]
        order = [int(i) for i in np.argsort(least_s, kind="stable") if least_s[i] < math.inf]
        if order:
            self.seconds(rows[order[0]])
            most_s = least_s[order[0]] * NEAR_BEST
            self.seeds[count] = [rows[i] for i in order[1:SEEDS] if least_s[i] < most_s]

    def turn(self, count: int, turn: int, counts: set[int]) -> None:
        best = self.best[count][1]
        begun = [best, *(self.seeds.get(count, []) if turn == 0 else [])]
        others = sorted((c for c in self.best if c != count), key=self.best.__getitem__)
        begun += [like(self.problem, self.best[c][1], count) for c in others[:LIKE]]
        many = self.bound is not None
        steps = STEPS[min(turn, len(STEPS) - 1)] * (1 if many else DRAWN)
        chains, drawn = (CHAINS, DRAWN) if many else (1, 1)
        self.anneal(list(dict.fromkeys(begun)), chains, drawn, steps, WARMTH[turn % len(WARMTH)])
        self.climb(self.best[count][1], counts)

    def anneal(self, begun: Sequence[Cuts], chains: int, drawn: int, steps: int, warmth: float) -> None:
        """Evaluate the best partitions on the ways of `chains` chains, each from one of `begun`."""
        draw = self.draw.draw
        rows = np.arange(chains)
        cuts = np.array([begun[i % len(begun)] for i in range(chains)])
        now_s = self.least_s(cuts)
        found_s, found, begin_s = now_s.copy(), cuts.copy(), now_s.min()
        for step in range(steps):
            if self.is_late():
                break
            self.work.add(STEP_S)
            moved = self.draw.move(np.repeat(cuts, drawn, axis=0))
            took_s, moved = self.least_s(moved).reshape(chains, drawn), moved.reshape(chains, drawn, -1)
            cost = warmth * begin_s * (1 - step / steps) ** 2
            may = took_s <= now_s[:, None] - cost * np.log(1 - draw.random((chains, drawn)))
            may &= (moved != cuts[:, None]).any(axis=2)
            first, goes = may.argmax(axis=1), may.any(axis=1)
            cuts[goes], now_s[goes] = moved[rows, first][goes], took_s[rows, first][goes]
            better = now_s < found_s
            found[better], found_s[better] = cuts[better], now_s[better]
        ends = dict.fromkeys(tuple(map(int, found[i])) for i in np.argsort(found_s, kind="stable"))
        least_s = {tuple(map(int, row)): float(seconds) for row, seconds in zip(found, found_s)}
        for end in list(ends)[:JUDGED]:
            if least_s[end] < self.best[len(end) - 1][0]:
                self.seconds(end)

    def climb(self, cuts: Cuts, counts: set[int]) -> None:
        """Take the move that may help most and continue with the moves after it, until none helps."""
        now_s = self.seconds(cuts)
        while cuts not in self.climbed and not self.is_late():
            self.climbed.add(cuts)
            faster = (move for move in self.promising(cuts, counts, now_s) if self.seconds(move) < now_s * (1 - 1e-9))
            cuts = next(faster, cuts)
            now_s = self.known[cuts]

    def promising(self, cuts: Cuts, counts: set[int], now_s: float) -> Iterator[Cuts]:
        """Moves that may be faster than `now_s`, those first that may be fastest."""
        near = list(self.moves(cuts, counts))
        least_s: dict[Cuts, float] = {}
        for _, same in itertools.groupby(sorted(near, key=len), key=len):
            rows = list(same)
            least_s.update(zip(rows, map(float, self.least_s(rows))))
        evaluated = 0
        for move in sorted(least_s, key=least_s.__getitem__):
            if least_s[move] >= now_s * (1 - 1e-9) or evaluated == CLIMBED:
                return
            evaluated += move not in self.known
            yield move

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
            larger = move_round(cuts, grown, shrunk, len(self.problem.units))
            if larger is not None:
                yield larger
        if last - 1 in counts:
            for i in range(1, last):
                yield (*cuts[:i], *cuts[i + 1 :])
        if last + 1 in counts:
            for i in range(1, last + 1):
                if cuts[i] - cuts[i - 1] > 1:
                    yield (*cuts[:i], (cuts[i - 1] + cuts[i]) // 2, *cuts[i:])


def move_round(cuts: Cuts, grown: int, shrunk: int, width: int) -> Cuts | None:
    """Each of `width` stages from `grown` on with one more block, and each from `shrunk` on with one less."""
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    if abs(grown - shrunk) < width or max(grown, shrunk) + width > len(sizes):
        return None
    for i in range(width):
        sizes[grown + i] += 1
        sizes[shrunk + i] -= 1
    return (0, *itertools.accumulate(sizes)) if min(sizes) > 0 else None
