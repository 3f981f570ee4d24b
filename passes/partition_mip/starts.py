"""First partitions of a search: by equal blocks, times or weights, in rounds, and like a better partition.

In: a `MipProblem` and a number of stages. Out: cut positions. Starts differ in what the stages share evenly (blocks,
time or weights in proportion to their devices) and in which rounds, or stages in a row, are larger. One start alone can
be several times slower than the best.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from .problem import LIKE, MipProblem

Cuts = tuple[int, ...]
RESIDENT_PART = 0.85  # the share of a resident device's memory for weights, gradients and states
MOST_MOVED = 2  # blocks for each stage, the most that separate equal rounds from the number that there are


def starts(problem: MipProblem, count: int) -> list[Cuts]:
    """Different first partitions into `count` stages."""
    p, length, n = problem, problem.num_blocks, len(problem.units)
    blocks = [float(i) for i in range(length + 1)]
    seconds, rates = seconds_of(p), rates_of(p)
    rooms = [unit.budget_bytes for unit in p.units]
    per_block = _cut(blocks, [1.0] * count)
    found = [
        per_block,
        tuple(length - c for c in reversed(per_block)),
        _cut(seconds, [rates[j % n] for j in range(count)]),
        _cut(p.weight_bytes, [rooms[j % n] for j in range(count)]),
        *(_cut(p.weight_bytes, shares) for shares in resident_shares(p, count)),
        *(rounds for shares in ([1.0] * n, rates) for rounds in equal_rounds(length, shares, count)),
    ]
    if count >= 2 * n:
        num_rounds = -(-count // n)
        for grown in ROUNDS:
            found.append(_cut(seconds, [rates[j % n] * grown((j // n + 0.5) / num_rounds) for j in range(count)]))
    return list(dict.fromkeys(found))


ROUNDS = (  # how much a round has, by how far it is from the first to the last: large in the middle, rising, falling
    lambda x: math.sin(math.pi * x),
    lambda x: 0.4 + math.sin(math.pi * x),
    lambda x: 0.5 + x,
    lambda x: 1.5 - x,
)


def equal_rounds(length: int, shares: Sequence[float], count: int) -> list[Cuts]:
    """Rounds with the same numbers of blocks, in proportion to the shares of their devices, but for what is left: the
    first or the last stages have a block more or less."""
    n, found = len(shares), []
    for whole in (length * n // count, length * n // count + 1):
        of_round = divide_in_proportion(max(n, whole), shares)
        sizes = [of_round[j % n] for j in range(count)]
        missing = length - sum(sizes)
        if abs(missing) > MOST_MOVED * count:
            continue
        step = 1 if missing > 0 else -1
        for order in (range(count), range(count - 1, -1, -1)):
            moved, left = list(sizes), abs(missing)
            while left:
                at = [j for j in order if moved[j] + step > 0][:left]
                for j in at:
                    moved[j] += step
                left -= len(at)
            found.append((0, *itertools.accumulate(moved)))
    return found


def is_chain(p: MipProblem) -> bool:
    """Whether devices are equal and most blocks alike."""
    return len(set(rates_of(p))) == 1 and Counter(p.kinds).most_common(1)[0][1] >= LIKE * p.num_blocks


def two_sizes(p: MipProblem, count: int) -> list[Cuts]:
    """Stages of two sizes in a chain, the larger ones in a row, anywhere: in multiples of what a common block takes, so
    that one of little time joins its neighbour. The first block, or none, is a stage of its own."""
    if not is_chain(p):
        return []
    length, took = p.num_blocks, np.array(seconds_of(p))
    common = p.kinds.index(Counter(p.kinds).most_common(1)[0][0])
    found = []
    for alone in (0, 1) if 1 < count < length else (0,):
        sums, stages = took[alone:] - took[alone], count - alone
        units = sums[-1] / (took[common + 1] - took[common])
        size = max(1, int(units / stages))
        for large in {math.floor(units) - size * stages, math.ceil(units) - size * stages}:
            if 0 <= large <= stages:
                j, first = np.arange(1, stages), np.arange(stages - large + 1)[:, None]
                passed = (size * j + np.clip(j - first, 0, large)) / (size * stages + large) * sums[-1]
                at = np.searchsorted(sums, passed)
                at -= passed - sums[at - 1] < sums[at] - passed
                at = np.maximum.accumulate(np.maximum(at, j) - j, axis=1) + j  # a block at least for each stage
                inner = np.minimum(at, len(sums) - 1 - stages + j) + alone
                found += [(0, *[1] * alone, *map(int, row), length) for row in inner]
    return list(dict.fromkeys(found))


def divide_in_proportion(whole: int, shares: Sequence[float]) -> list[int]:
    """Positive whole numbers with this sum, at least their number, in proportion to `shares`."""
    wanted = [whole * share / sum(shares) for share in shares]
    found = [max(1, int(x)) for x in wanted]
    while sum(found) < whole:
        found[max(range(len(found)), key=lambda i: wanted[i] - found[i])] += 1
    while sum(found) > whole:
        found[min((i for i in range(len(found)) if found[i] > 1), key=lambda i: wanted[i] - found[i])] -= 1
    return found


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


def like(p: MipProblem, cuts: Cuts, count: int) -> Cuts:
    """A partition into `count` stages whose devices and rounds have the shares of time that those of `cuts` have."""
    n, seconds = len(p.units), seconds_of(p)
    took = [seconds[b] - seconds[a] for a, b in itertools.pairwise(cuts)]
    shares = []
    for j in range(count):
        own = took[j % n :: n] or [seconds[-1] / len(took)]
        at = min(max((j // n + 0.5) * len(took) / count - 0.5, 0.0), len(own) - 1.0)
        before, after = own[int(at)], own[min(int(at) + 1, len(own) - 1)]
        shares.append(before + (after - before) * (at - int(at)))
    return _cut(seconds, shares)


def seconds_of(p: MipProblem) -> list[float]:
    """Running sums of what the blocks take on the first device."""
    return [f + b for f, b in zip(p.forward_s[0], p.backward_s[0])]


def rates_of(p: MipProblem) -> list[float]:
    """By device, 1 over the seconds of all blocks."""
    return [1.0 / (f[-1] + b[-1]) for f, b in zip(p.forward_s, p.backward_s)]


def _cut(sums: Sequence[float], shares: Sequence[float]) -> Cuts:
    """Cuts where the running sums pass each stage's share of the whole, with at least one block a stage."""
    count, length = len(shares), len(sums) - 1
    values, j = np.asarray(sums), np.arange(1, count)
    target = values[-1] * np.cumsum(shares)[:-1] / sum(shares)
    at = values.searchsorted(target)
    at -= (at > 0) & (target - values[at - 1] < values[np.minimum(at, length)] - target)
    inner = np.minimum(np.maximum.accumulate(np.maximum(at, j) - j) + j, length - count + j)
    return (0, *map(int, inner), length)
