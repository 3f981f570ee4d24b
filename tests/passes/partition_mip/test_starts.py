"""First partitions of a search."""

from __future__ import annotations

import itertools

import pytest

from penstock.passes.partition_mip.starts import divide_in_proportion, equal_rounds, like, starts, two_sizes
from penstock.tests.passes.partition_mip.mip_instances import problem


def test_starts_give_every_stage_a_block_and_fast_devices_more() -> None:
    p = problem([0] * 12, [1.0, 3.0], [0, 1], [600.0] * 2)
    for count in range(1, 13):
        for cuts in [*starts(p, count), like(p, (0, 1, 4, 12), count)]:
            assert len(cuts) == count + 1 and cuts[0] == 0 and cuts[-1] == 12
            assert all(a < b for a, b in itertools.pairwise(cuts))
    assert (0, 3, 12) in starts(p, 2)


def test_rounds_are_equal_but_for_the_first_or_the_last() -> None:
    """14 blocks in three rounds: of 1 and 3, and 2 blocks more; or of 1 and 4, and one less."""
    assert equal_rounds(14, [1.0, 3.0], 6) == [
        (0, 2, 6, 7, 10, 11, 14),
        (0, 1, 4, 5, 8, 10, 14),
        (0, 1, 4, 5, 9, 10, 14),
        (0, 1, 5, 6, 10, 11, 14),
    ]


def test_the_larger_of_two_sizes_are_in_a_row_anywhere() -> None:
    """A block of little time before six others, in four stages: two of these have two of the six."""
    p = problem([1, *[0] * 6], [1.0] * 2, [0, 1], [600.0] * 2, seconds=(1.0, 0.1))
    sizes = [tuple(b - a for a, b in itertools.pairwise(cuts)) for cuts in two_sizes(p, 4)]
    assert {(3, 2, 1, 1), (2, 2, 2, 1), (2, 1, 2, 2), (1, 2, 2, 2)} <= {*sizes}
    for count in range(1, 8):
        for cuts in two_sizes(p, count):
            assert cuts[0] == 0 and cuts[-1] == 7 and len(cuts) == count + 1
            assert all(a < b for a, b in itertools.pairwise(cuts))
    assert two_sizes(problem([0] * 6, [1.0, 2.0], [0, 1], [600.0] * 2), 3) == []


@pytest.mark.parametrize(("whole", "shares", "found"), [(8, [1.0, 3.0], [2, 6]), (5, [1.0, 100.0, 1.0], [1, 3, 1])])
def test_whole_numbers_in_proportion(whole: int, shares: list[float], found: list[int]) -> None:
    assert divide_in_proportion(whole, shares) == found


def test_a_partition_like_another_has_its_devices_and_rounds() -> None:
    p = problem([0] * 32, [1.0, 1.0], [0, 1], [600.0] * 2)
    cuts = (0, 1, 4, 6, 12, 15, 32)  # the second device has more than the first, and later rounds more than earlier
    assert like(p, cuts, 6) == cuts
    sizes = [b - a for a, b in itertools.pairwise(like(p, cuts, 8))]
    assert all(small < large for small, large in zip(sizes[::2], sizes[1::2])) and sizes[1::2] == sorted(sizes[1::2])
