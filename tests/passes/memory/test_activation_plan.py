"""The arithmetic of activation swapping: eq. 1 to 12 by hand, the sweep against all subsets, convexity, capacities."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.passes.memory.activation_plan import (
    CLASSES,
    CLOSE,
    INPUTS,
    ActivationProblem,
    Half,
    Item,
    LinkRates,
    Room,
    best,
    place,
    point_of,
    sort_by_benefit,
    sweep,
    table,
)

STAGES = ("stage0", "stage1", "stage2", "stage3")
AMPLE = Room(1e12, 1e12, 1e12)


def problem(items: Sequence[Item], memories: tuple[str, ...] = ("ssd",), **changes: object) -> ActivationProblem:
    """A step that computes 2 + 6 s; what is on SSD passes links of 100 B/s and disks of 50 B/s each way."""
    usual = ActivationProblem(
        forward=Half(2.0, read_bytes=20),
        backward=Half(6.0, cpu_s=1.0, h2d_bytes=100, d2h_bytes=50, read_bytes=100, write_bytes=50),
        rates=LinkRates(h2d=100, d2h=100, read=50, write=50),
        room=AMPLE,
        items=tuple(items),
        inputs={},
        stages=STAGES,
        memories=memories,
    )
    return replace(usual, **changes)


def equal_items(saved_s: Sequence[float], num_bytes: int = 10) -> list[Item]:
    return [Item(STAGES[i % 4], f"c{i}", num_bytes, s) for i, s in enumerate(saved_s)]


def by_subset(case: ActivationProblem, kept: Sequence[Item]) -> float:
    """The step if these are kept, counted anew."""
    classes = dict.fromkeys(STAGES, 0)
    for item in kept:
        classes[item.stage] += item.bytes
    return point_of(case, 0, classes, 0, sum(item.saved_s for item in kept)).step_s


items_of_any_size = st.lists(
    st.builds(
        Item,
        st.sampled_from(STAGES),
        st.integers(0, 999).map(str),
        st.integers(1, 60),
        st.floats(0.0, 1.0).map(lambda s: round(s, 3)),
    ),
    max_size=8,
    unique_by=lambda item: (item.stage, item.name),
)


def test_a_point_by_hand() -> None:
    """Eq. 2 to 8: 40 bytes more go out in forward and come back in backward, and save 1.5 s there."""
    (none, kept) = sweep(problem([Item("stage0", "c", 40, 1.5)]))
    assert none.step_s == pytest.approx(max(2.0, 20 / 50) + max(6.0, 1.0, 100 / 100, 50 / 100, 150 / 50))
    forward_s = max(2.0, 0 / 100, 40 / 100, 20 / 50 + 40 / 50)
    backward_s = max(6.0 - 1.5, 1.0, 140 / 100, 50 / 100, 140 / 50 + 50 / 50)
    assert kept.step_s == pytest.approx(forward_s + backward_s)
    assert (kept.kept_bytes, kept.moved_bytes, kept.ssd_bytes) == (40, 40, 40)
    assert (kept.forward_bound, kept.backward_bound) == ("compute", "compute")


def test_the_better_per_byte_come_first_and_equal_ones_are_spread() -> None:
    good = [Item(stage, "down", 10, 4.0) for stage in STAGES]
    plain = [Item(stage, "up", 40, 4.0) for stage in STAGES]
    order = sort_by_benefit([*plain, *good], STAGES)
    assert order[:4] != good and sorted(order[:4], key=lambda item: item.stage) == good
    numbers = [STAGES.index(item.stage) for item in order[:4]]
    assert abs(numbers[0] - numbers[1]) > 1


@settings(max_examples=50)
@given(items_of_any_size)
def test_the_step_is_convex_in_the_bytes(items: list[Item]) -> None:
    """Slopes never fall where everything passes the same links."""
    points = sweep(problem(items))
    slopes = [(b.step_s - a.step_s) / (b.kept_bytes - a.kept_bytes) for a, b in itertools.pairwise(points)]
    assert all(b >= a - 1e-5 for a, b in itertools.pairwise(slopes))


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.integers(1, 60))
def test_of_equal_sizes_no_subset_is_better(saved_s: list[float], num_bytes: int) -> None:
    case = problem(equal_items(saved_s, num_bytes))
    subsets = itertools.chain.from_iterable(itertools.combinations(case.items, n) for n in range(len(case.items) + 1))
    least_s = min(by_subset(case, kept) for kept in subsets)
    points = sweep(case)
    assert min(point.step_s for point in points) == pytest.approx(least_s)
    assert best(points).step_s <= least_s * CLOSE * (1 + 1e-9)


@settings(max_examples=50)
@given(items_of_any_size)
def test_of_any_sizes_no_subset_is_better_by_more_than_a_part_of_one(items: list[Item]) -> None:
    """Whole classes do not always fill the amount that a subset has: between two points of the curve lies one class."""
    case = problem(items)
    points = sweep(case)

    def curve_s(kept_bytes: int) -> float:
        after = next(point for point in points if point.kept_bytes >= kept_bytes)
        before = points[max(0, after.count - 1)]
        part = (kept_bytes - before.kept_bytes) / max(1, after.kept_bytes - before.kept_bytes)
        return before.step_s + part * (after.step_s - before.step_s)

    slack_s = max((item.saved_s + item.bytes / 25 for item in items), default=0.0)
    for n in range(len(items) + 1):
        for kept in itertools.combinations(items, n):
            assert by_subset(case, kept) >= curve_s(sum(item.bytes for item in kept)) - slack_s


def test_nothing_moves_where_links_bound_and_something_where_computation_does() -> None:
    """As at Fuyou's small and large batches (figure 9)."""
    items = equal_items([0.2] * 8)
    bound_by_disks = problem(items, backward=Half(6.0, read_bytes=400, write_bytes=200))
    chosen = best(sweep(bound_by_disks))
    assert (chosen.count, chosen.backward_bound) == (0, "ssd")
    chosen = best(sweep(problem(items)))
    assert chosen.count > 0 and chosen.step_s < sweep(problem(items))[0].step_s


@settings(max_examples=25)
@given(st.integers(0, 1 << 20), st.sampled_from([-1.0, 0.0, 0.3, 0.77, 1.0]))
def test_of_many_items_the_best_is_that_of_all_numbers(seed: int, share: float) -> None:
    draw = random.Random(seed)
    items = [Item(draw.choice(STAGES), str(i), draw.randint(1, 4), draw.choice([0.0, 0.01, draw.random() / 50]))
             for i in range(draw.randint(60, 400))]  # fmt: skip
    case = problem(items)
    few = sweep(case, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.passes.memory.activation_plan.MOST_POINTS", len(items))
        every = sweep(case, share)
    assert len(every) == len(items) + 1 and len(few) <= 2 * 64
    assert best(few, share).count == best(every, share).count


def test_a_share_is_what_is_asked_for() -> None:
    points = sweep(problem(equal_items([0.2] * 8)))
    assert [best(points, share).count for share in (0, 0.25, 0.5, 1)] == [0, 2, 4, 8]


def test_of_equal_steps_the_one_that_moves_least_and_keeps_most() -> None:
    """Bound by disks, only what fits the device is kept."""
    case = problem(
        equal_items([0.2] * 8), ("device", "ssd"), room=Room(35, 0, 1e12), backward=Half(6.0, read_bytes=900)
    )
    chosen = best(sweep(case))
    assert chosen.kept_bytes == 30 and chosen.moved_bytes == 0


def test_of_equal_steps_the_one_with_the_fewest_bytes_on_disks() -> None:
    """Both move the same bytes."""
    points = [point_of(problem([], (memory,), inputs={"stage0": 10}), 0, {}, 0, 0.0) for memory in ("ssd", "dram")]
    assert points[0].step_s == points[1].step_s and points[0].moved_bytes == points[1].moved_bytes == 10
    assert best(points) is points[1]


def test_the_last_stages_stay_and_the_disks_get_what_has_no_room() -> None:
    inputs = dict.fromkeys(STAGES, 10)
    case = problem([], ("device", "dram", "ssd"), inputs=inputs, room=Room(25, 10, 1e12))
    places, fits = place(case, dict.fromkeys(STAGES, 0))
    assert fits
    assert [places[stage, INPUTS] for stage in STAGES[2:]] == ["device", "device"]
    assert sorted(places[stage, INPUTS] for stage in STAGES[:2]) == ["dram", "ssd"]


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 30), min_size=8, max_size=8),
    st.tuples(st.integers(0, 90), st.integers(0, 90), st.integers(0, 90)),
    st.integers(0, 90),
)
def test_no_memory_is_given_out_twice_and_disks_only_get_what_dram_cannot_hold(
    sizes: list[int], room: tuple[int, int, int], passing: int
) -> None:
    classes, inputs = dict(zip(STAGES, sizes[:4])), dict(zip(STAGES, sizes[4:]))
    case = problem([], ("device", "dram", "ssd"), inputs=inputs, room=Room(*room, passing))
    places, fits = place(case, classes)
    taken = dict.fromkeys(case.memories, 0)
    for (stage, what), memory in places.items():
        taken[memory] += classes[stage] if what == CLASSES else inputs[stage]
    assert sum(taken.values()) == sum(sizes)
    if fits:
        assert all(taken[memory] <= most for memory, most in zip(case.memories, room))
    else:
        assert taken["ssd"] > room[2]
    if taken["ssd"]:
        assert taken["dram"] <= max(0, room[1] - passing) and taken["dram"] + taken["ssd"] > room[1]


def test_where_nothing_has_room_nothing_more_is_kept() -> None:
    case = problem(equal_items([5.0] * 4), inputs={"stage1": 50}, room=Room(0, 0, 40))
    chosen = best(sweep(case))
    assert chosen.count == 0 and not chosen.fits
    assert "does not fit" in table(sweep(case), chosen)


def test_the_table_shows_the_ends_and_the_chosen_one() -> None:
    points = sweep(problem(equal_items([0.2] * 20)))
    chosen = points[7]
    lines = table(points, chosen).splitlines()
    assert 8 <= len(lines) - 1 <= 9
    assert [line.startswith("*") for line in lines].count(True) == 1
    assert lines[1].split()[:2] == ["0.00", "B"] and "200 B" in lines[-1]
