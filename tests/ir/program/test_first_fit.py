"""Places by first fit are those that a search of all live places from the bottom finds."""

from __future__ import annotations

import random

import pytest

from penstock.ir.program import FirstFit

ALIGNMENT = 512


def lowest(live: list[tuple[int, int]], num_bytes: int) -> int:
    """The lowest offset at which so many bytes, rounded up, meet none of the places."""
    need, offset = -(-num_bytes // ALIGNMENT) * ALIGNMENT, 0
    for start, end in sorted(live):
        if offset + need <= start:
            break
        offset = max(offset, end)
    return offset


@pytest.mark.parametrize("seed", range(20))
def test_each_value_gets_the_lowest_place_that_is_large_enough(seed: int) -> None:
    draw, arena = random.Random(seed), FirstFit(ALIGNMENT)
    live: dict[int, tuple[int, int]] = {}
    top = 0
    for key in range(120):
        if live and draw.random() < 0.45:
            gone = draw.choice([*live])
            del live[gone]
            arena.give(gone)
        num_bytes = draw.choice((0, 1, 511, 512, 513, draw.randrange(1, 1 << 14)))
        offset = arena.take(key, num_bytes)
        assert offset == lowest([*live.values()], num_bytes)
        live[key] = (offset, offset + -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        top = max(top, live[key][1])
        assert arena.size == top
    arena.give("nothing")
