"""Places by first fit are those that a search of all live places from the bottom finds; both ends are used where that
takes less, and never do two values that are there together meet."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.program import ArenaPlaces
from penstock.ir.program.places import FreeRoom

ALIGNMENT = 512


def lowest(live: list[tuple[int, int]], num_bytes: int) -> int:
    """The lowest offset at which so many bytes meet none of the places."""
    offset = 0
    for start, end in sorted(live):
        if offset + num_bytes <= start:
            break
        offset = max(offset, end)
    return offset


@pytest.mark.parametrize("top", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_each_value_gets_the_outermost_place_that_is_large_enough(seed: int, top: bool) -> None:
    draw, size = random.Random(seed), 1 << 19
    room = FreeRoom(size if top else math.inf)
    live: dict[int, tuple[int, int]] = {}
    for key in range(120):
        if live and draw.random() < 0.45:
            gone = draw.choice([*live])
            del live[gone]
            room.give(gone)
        num_bytes = draw.choice((0, 1, 511, 512, 513, draw.randrange(1, 1 << 13)))
        offset = room.take(key, num_bytes, top)
        assert offset is not None
        places = [(size - end, size - start) if top else (start, end) for start, end in live.values()]
        wanted = lowest(places, num_bytes) if num_bytes else 0
        assert offset == (size - wanted - num_bytes if top and num_bytes else wanted)
        if num_bytes:
            live[key] = (offset, offset + num_bytes)
    room.give("nothing")


def test_a_block_that_is_too_small() -> None:
    room = FreeRoom(10)
    assert room.take("a", 6) == 0
    assert room.take("b", 6) is None
    assert room.take("c", 4, top=True) == 6


STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 5000), st.integers(0, 30)), max_size=40)


@given(steps=STEPS)
def test_no_two_values_meet(steps: list[tuple[bool, int, int]]) -> None:
    places, there, spans = ArenaPlaces(ALIGNMENT), list[int](), dict[int, tuple[int, int, int]]()
    most = 0
    for now, (goes, num_bytes, which) in enumerate(steps):
        if goes and there:
            gone = there.pop(which % len(there))
            places.give(gone)
            spans[gone] = (spans[gone][0], now, spans[gone][2])
            continue
        places.take(now, num_bytes, there[which % len(there)] if there and which % 3 == 0 else None)
        spans[now] = (now, len(steps), -(-num_bytes // ALIGNMENT) * ALIGNMENT)
        there.append(now)
        most = max(most, sum(spans[key][2] for key in there))
    offsets = places.offsets.offsets
    assert most <= places.bytes and offsets.keys() == spans.keys()
    assert places.bytes == max((offsets[key] + size for key, (_, _, size) in spans.items()), default=0)
    for a, (a_from, a_to, a_size) in spans.items():
        assert offsets[a] % ALIGNMENT == 0
        for b, (b_from, b_to, b_size) in spans.items():
            if a < b and a_size and b_size and a_from < b_to and b_from < a_to:
                assert offsets[a] + a_size <= offsets[b] or offsets[b] + b_size <= offsets[a]


def chain(sizes: list[int], parts: bool) -> ArenaPlaces:
    """Values of which each comes, or its first third does, while the one before it is there."""
    places = ArenaPlaces(1)
    for i, size in enumerate(sizes):
        first = size // 3 if parts else size
        places.take((i, "part"), first)
        if i > 0:
            places.give((i - 1, "part"))
            places.give((i - 1, "rest"))
        if first < size:
            places.take((i, "rest"), size - first, beside=(i, "part"))
    return places


@given(sizes=st.lists(st.integers(1, 50), min_size=2, max_size=12))
def test_neighbours_take_no_more_than_both_of_them(sizes: list[int]) -> None:
    """Two neighbours are there together (Mobius eq. 5): 7, 9, 8, 9 by first fit take 24, not 17."""
    assert chain(sizes, parts=False).bytes == max(a + b for a, b in pairwise(sizes))


def test_equal_values_lie_as_low_as_they_can() -> None:
    assert [*chain([4, 4, 4, 4], parts=False).offsets.offsets.values()] == [0, 4, 0, 4]


def test_what_is_fetched_in_two_parts_lies_together() -> None:
    sizes = [9, 6, 12, 3, 9]
    assert chain(sizes, parts=True).bytes == max(max(a + b // 3, b) for a, b in pairwise(sizes))


def sums_between_weights(layers: int, micro_batches: int) -> ArenaPlaces:
    """Weights of tables, layers and a head come one stage ahead for the forwards of a micro-batch and, the last ones
    first, for its backwards. After a stage's first backward comes its sum, which stays; what is added to that later has
    room for a moment."""
    widths = [60, 1, 2, *[200] * layers, 20, 1]
    places, turns = ArenaPlaces(1), [*range(len(widths)), *reversed(range(len(widths)))] * micro_batches
    for now, stage in enumerate(turns):
        places.take(("weights", now), widths[stage])
        if now > 0:
            places.give(("weights", now - 1))
            before = turns[now - 1]
            if now % (2 * len(widths)) > len(widths):
                if now < 2 * len(widths):
                    places.take(("sum", before), widths[before] // 20)
                places.take(("room", now), widths[before] // 20)
                places.give(("room", now))
    return places


@pytest.mark.parametrize("layers", [4, 20])
def test_sums_that_come_between_weights_leave_no_gaps(layers: int) -> None:
    """With a second micro-batch, values that stay make first fit and both ends leave room for half a layer or more."""
    assert sums_between_weights(layers, 2).bytes == 401 + 10 * layers


def test_where_many_values_are_there_together_the_first_fit_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ir.program.places.MOST_MEETINGS", 3)
    assert sums_between_weights(20, 2).bytes == 641
