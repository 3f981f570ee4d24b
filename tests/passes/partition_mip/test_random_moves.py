"""Random moves stay partitions, and a search with the same rows draws the same ones."""

from __future__ import annotations

import numpy as np

from penstock.passes.partition_mip.random_moves import RandomMoves
from penstock.tests.passes.partition_mip.mip_instances import problem


def test_moves_are_partitions_of_each_kind() -> None:
    p = problem([0] * 24, [1.0] * 3, [0, 1, 0], [60.0] * 3)
    cuts = np.array([range(0, 25, 2)] * 2000)
    moves = RandomMoves(p)
    moved, again = moves.move(cuts), moves.move(cuts)
    assert (moved[:, 0] == 0).all() and (moved[:, -1] == 24).all() and (np.diff(moved, axis=1) > 0).all()
    changes = np.diff(moved, axis=1) - 2
    num_changed = (changes != 0).sum(axis=1)
    assert (num_changed == 2).sum() > 1000  # a block from one stage to another
    whole = (num_changed == 8) & (np.abs(changes).max(axis=1) == 1)  # from one device to another in all four rounds
    assert whole.any() and (changes[whole].reshape(-1, 4, 3) == changes[whole][:, None, :3]).all()
    assert (moved != again).any() and (moved == RandomMoves(p).move(cuts)).all()


def test_one_stage_has_no_move() -> None:
    p = problem([0] * 4, [1.0], [0], [60.0])
    assert (RandomMoves(p).move(np.array([[0, 4]] * 5)) == [0, 4]).all()
