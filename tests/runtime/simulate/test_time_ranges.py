"""Seconds that ranges cover."""

from __future__ import annotations

from penstock.runtime.simulate.time_ranges import length, overlap, union


def test_each_second_counts_once() -> None:
    found = union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (5.0, 5.0)])
    assert found == [(0.0, 2.0), (3.0, 4.0)]
    assert length(found) == 3.0
    assert overlap(found, [(1.5, 3.25), (3.5, 9.0)]) == 0.5 + 0.25 + 0.5
    assert union([]) == [] and overlap(found, []) == 0.0
