"""The linear models and the program over totals bound every partition that they speak of, and no more."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import mip
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.passes.partition_mip.local_search import Cuts, Search
from penstock.passes.partition_mip.problem import MipProblem
from penstock.passes.partition_mip.proof import model
from penstock.passes.partition_mip.proof.intervals import IntervalTables
from penstock.passes.partition_mip.proof.limits import BlockIntervals, BlockLimits, Largest
from penstock.passes.partition_mip.proof.model import MOST_PLACES, CountModel
from penstock.passes.partition_mip.proof.most_kept import MostKept
from penstock.passes.partition_mip.proof.solve import CLOSE, _Node, _Tree, few_partitions, forbid_trials, rotates
from penstock.passes.partition_mip.proof.totals import TotalsModel
from penstock.passes.partition_mip.recurrence import _on, contended_s, residents
from penstock.tests.passes.partition_mip.mip_instances import alike, problem, small_problems

Stays = tuple[bool, ...]
MOST_CHECKED = 6  # partitions of a problem


def best_by_stages_and_residents(p: MipProblem) -> dict[tuple[int, Stays], tuple[float, Cuts]]:
    """By number of stages and resident devices, those without a stage as not resident, the fastest partition."""
    found: dict[tuple[int, Stays], tuple[float, Cuts]] = {}
    for count in range(1, p.num_blocks + 1):
        for inner in itertools.combinations(range(1, p.num_blocks), count - 1):
            cuts = (0, *inner, p.num_blocks)
            seconds = contended_s(p, cuts)
            if seconds < math.inf:
                stays = tuple(d < count and yes for d, yes in enumerate(residents(p, cuts)))
                found[count, stays] = min((seconds, cuts), found.get((count, stays), (math.inf, cuts)))
    return found


def optimum(model: mip.Model, relax: bool = False) -> float:
    status = model.optimize(relax=relax, max_seconds=20)
    return math.inf if "INFEASIBLE" in status.name else (model.objective_value if relax else model.objective_bound)


def common_blocks(p: MipProblem, cuts: Sequence[int]) -> list[int]:
    """The number of common blocks of each stage."""
    common = BlockLimits(p).common
    return [p.kinds[a:b].count(common) for a, b in itertools.pairwise(cuts)]


def which_of(p: MipProblem, cuts: Sequence[int], least: int) -> Largest:
    """The facts of the stages with at least this number of common blocks."""
    blocks = common_blocks(p, cuts)
    runs_again = {j for d in range(len(p.units)) for j in p.placed.get(_on(cuts, d, len(p.units)), (0.0, []))[1]}
    return Largest(least, max(blocks), any(blocks[j] >= least for j in runs_again))


def check_largest(p: MipProblem, most_checked: int = MOST_CHECKED) -> None:
    """By number of stages, residence, largest stage and whether it runs again, every fastest partition; and few of them
    are listed."""
    limits = BlockLimits(p)
    found: dict[tuple[int, Stays, Largest], float] = {}
    listed = {most: set(few_partitions(p, most, limits.common)) for most in range(4)}
    for count in range(1, p.num_blocks + 1):
        for inner in itertools.combinations(range(1, p.num_blocks), count - 1):
            cuts = (0, *inner, p.num_blocks)
            largest = max(common_blocks(p, cuts))
            for most, some in listed.items():
                assert (cuts in some) == (largest <= most)
            seconds = contended_s(p, cuts)
            if seconds < math.inf:
                stays = tuple(d < count and yes for d, yes in enumerate(residents(p, cuts)))
                for least in range(1, largest + 1):
                    key = (count, stays, which_of(p, cuts, least))
                    found[key] = min(seconds, found.get(key, math.inf))
    for (count, stays, known), seconds in sorted(found.items(), key=lambda row: row[1])[:most_checked]:
        n, either = len(p.units), (None,) * len(p.units)
        ranges = {(count, count), (n, p.num_blocks) if count >= n else (count, count)}
        for largest_stage in (known, dataclasses.replace(known, most=None), dataclasses.replace(known, reruns=None)):
            kept = MostKept(limits).of(count, largest_stage, seconds * 1.001) if all(stays) else math.inf
            more = {"largest": largest_stage, "kept": kept}
            models = [CountModel(limits, count, stays, **more)]
            for low, high in ranges:
                models += [TotalsModel(limits, low, high, stays, **more)]
                models += [TotalsModel(limits, low, high, either, sum(stays), rotates(p) and count >= n, **more)]
            assert all(optimum(each.model, relax=True) <= seconds * (1 + 1e-6) for each in models)
            if rotates(p) and count >= n:  # with the device of the last stage the same, for all numbers of stages
                turned = (count - p.num_blocks) % len(stays)
                turns = stays[turned:] + stays[:turned]
                relaxed = CountModel(limits, p.num_blocks, turns, fewest=count, **more).model
                assert optimum(relaxed, relax=True) <= seconds * (1 + 1e-6)


def narrow(tables: IntervalTables, solved: CountModel, cuts: Cuts, cutoff_s: float) -> BlockIntervals:
    """The intervals that are left below a cutoff, those of a faster partition among them."""
    through = tables.least_through(solved)
    assert float(through[0].min()) == pytest.approx(tables.bound_s(solved))
    left = [seconds < cutoff_s for seconds in through]
    assert all(left[j][a, b] for j, (a, b) in enumerate(itertools.pairwise(cuts)))
    return left


def check_narrowing(p: MipProblem, most: int) -> None:
    """By number of stages and residence, and by several numbers of stages, whatever is to be proven of the fastest."""
    for (count, stays), (seconds, cuts) in sorted(best_by_stages_and_residents(p).items(), key=lambda row: row[1])[
        :most
    ]:
        search = Search(p, contended_s)
        search.best[count] = (seconds * 1.3, cuts)
        tree = _Tree(search, CountModel, TotalsModel, math.inf)
        tree.limits.unlike = True
        tree.intervals = IntervalTables(tree.limits)
        n = len(p.units)
        highest = p.num_blocks - (p.num_blocks - count) % n if count > n else count
        for high in {count, highest}:
            node, before_s = _Node(0.0, stays, count, high, step=n), -1.0
            while before_s < node.bound_s < seconds * 1.3 * (1 - CLOSE):
                before_s = node.bound_s
                tree.narrow(node)
            assert node.bound_s <= seconds * (1 + 1e-6)


def check(p: MipProblem, most: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        check_models(p, most, monkeypatch)


def check_models(p: MipProblem, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fastest `most` partitions that differ in stages or residence, by every model that speaks of them."""
    limits, n = BlockLimits(p), len(p.units)
    limits.unlike = True
    tables = IntervalTables(limits)
    rows = sorted(best_by_stages_and_residents(p).items(), key=lambda row: row[1])[:most]
    for (count, stays), (seconds, cuts) in rows:
        assert optimum(CountModel(limits, count, stays).model, relax=True) <= seconds * (1 + 1e-6)
        counted = CountModel(limits, count, stays, cutoff_s=seconds * 1.001)
        if optimum(counted.model, relax=True) < math.inf:
            assert tables.bound_s(counted) <= seconds * (1 + 1e-6)
        for places in (MOST_PLACES, 0):  # with the order of the blocks, and where these are too many for it
            monkeypatch.setattr(model, "MOST_PLACES", places)
            ordered = CountModel(limits, count, stays, cutoff_s=seconds * 1.001, ordered=True)
            left: BlockIntervals | None = None
            if optimum(ordered.model, relax=True) < math.inf:
                assert tables.bound_s(ordered) <= seconds * (1 + 1e-6)
                left = narrow(tables, ordered, cuts, seconds * 1.001)
            more: dict[str, Any] = {"cutoff_s": seconds * 1.001, "left": left}
            whole = CountModel(limits, count, stays, ordered=True, whole=True, **more)
            assert optimum(whole.model) <= seconds * (1 + 1e-6)
            assert optimum(CountModel(limits, count, stays, integer=True, **more).model) <= seconds * (1 + 1e-6)
            again = CountModel(limits, count, stays, ordered=True, **more)
            assert optimum(again.model, relax=True) <= seconds * (1 + 1e-6)
            assert tables.bound_s(again) <= seconds * (1 + 1e-6)
        faster = CountModel(limits, count, stays, integer=True, cutoff_s=seconds * 1.001).model
        assert optimum(faster) <= seconds * (1 + 1e-6)
        if count > n:
            largest = p.num_blocks - (p.num_blocks - count) % n
            for has_order in (False, True):
                idle = CountModel(limits, largest, stays, fewest=count, ordered=has_order)
                assert optimum(idle.model, relax=True) <= seconds * (1 + 1e-6)
                assert tables.bound_s(idle) <= seconds * (1 + 1e-6)
        assert optimum(TotalsModel(limits, count, count, stays).model) <= seconds * (1 + 1e-6)
    if rows:
        (count, _), (seconds, _) = rows[0]
        for low, high in ((1, p.num_blocks), (count, p.num_blocks)):
            assert optimum(TotalsModel(limits, low, high, (None,) * n).model) <= seconds * (1 + 1e-6)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(small_problems(most_blocks=6))
def test_models_bound_the_fastest_partitions(p: MipProblem) -> None:
    check(p, 3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(small_problems(most_blocks=8))
def test_models_bound_many_partitions(p: MipProblem) -> None:
    check(p, 12)


@settings(max_examples=6, deadline=None)
@given(small_problems(most_blocks=6))
def test_what_is_left_out_is_no_faster(p: MipProblem) -> None:
    check_narrowing(p, 3)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(small_problems(most_blocks=8))
def test_what_is_left_out_of_many_is_no_faster(p: MipProblem) -> None:
    check_narrowing(p, 12)


def test_the_order_of_blocks_bounds_more() -> None:
    """A message takes 1 s but after the fourth block, where only one of six cuts can be."""
    p = problem([2, 0, 0] * 3, [1.0] * 3, [0, 1, 0], [600.0] * 3)
    p = dataclasses.replace(p, message_bytes=[0.0, *[1e7 if cut == 4 else 1e9 for cut in range(1, 9)], 0.0])
    models = [CountModel(BlockLimits(p), 7, (True,) * 3, ordered=ordered).model for ordered in (False, True)]
    assert optimum(models[0], relax=True) * 1.02 < optimum(models[1], relax=True)


def test_whole_numbers_of_blocks_on_devices_bound_more() -> None:
    p = problem([2, 0, 0] * 3, [1.0] * 3, [0, 1, 0], [600.0] * 3)
    models = [CountModel(BlockLimits(p), 7, (True,) * 3, ordered=True, whole=whole).model for whole in (False, True)]
    assert optimum(models[0], relax=True) * 1.02 < optimum(models[1])


def test_memory_of_stages_that_fit_nothing_is_not_used() -> None:
    """Of a stage that is too large it is known only that it is, so it does not say what a block adds to one."""
    p = problem([0, 1, 0, 0, 2, 0], [1.0] * 2, [0, 1], [25.0] * 2)
    most = p.units[0].budget_bytes
    work = [
        [min(bytes_, max(0.0, most - p.weight_bytes[b] + p.weight_bytes[a]) + 1e6) for a, bytes_ in enumerate(row)]
        for b, row in enumerate(p.work_bytes)
    ]
    capped = dataclasses.replace(p, work_bytes=work)
    assert capped.work_bytes != p.work_bytes and BlockLimits(capped).added == BlockLimits(p).added


def test_devices_take_each_others_places() -> None:
    speeds, budgets = [1.0] * 4, [60.0] * 4
    assert rotates(problem([0] * 6, speeds, [0, 1, 0, 1], budgets))
    assert rotates(problem([0] * 6, speeds, [0, 0, 0, 0], budgets))
    assert not rotates(problem([0] * 6, speeds, [0, 0, 0, 1], budgets))
    assert not rotates(problem([0] * 6, [1.0, 1.0, 1.0, 1.7], [0, 1, 0, 1], budgets))
    assert not rotates(problem([0] * 6, speeds, [0, 1, 0, 1], [60.0, 60.0, 25.0, 60.0]))


def test_a_choice_of_residents_stands_for_those_in_turn() -> None:
    choices = itertools.combinations(range(4), 2)
    nodes = [_Node(10.0 + i, tuple(d in which for d in range(4)), 4, 16) for i, which in enumerate(choices)]
    found = {node.residents: node.bound_s for node in _Tree.bound_by_turns(nodes)}
    neighbours, opposite = (True, True, False, False), (True, False, True, False)
    assert [found[neighbours[turn:] + neighbours[:turn]] for turn in range(4)] == [10.0] * 4
    assert [found[opposite[turn:] + opposite[:turn]] for turn in range(4)] == [11.0] * 4


def equal_layers(budget: float) -> MipProblem:
    """48 layers on eight devices. A layer takes 6 s, and 1 GB for each micro-batch that it keeps; a message 0.2 s."""
    devices = ([1.0] * 8, [0, 1] * 4, [budget] * 8)
    return problem([0] * 48, *devices, micro_batches=8, seconds=(2.0,), weights=(1.0,), shared=1.0, rate=0.05)


def test_totals_know_that_a_micro_batch_passes_all_stages() -> None:
    """Each device works for 6 layers and 8 micro-batches, 288 s; the first micro-batch takes as long to pass all, and
    the others pass a stage with a 24th part of them or more."""
    p = equal_layers(600.0)
    least_s = optimum(TotalsModel(BlockLimits(p), 8, 24, (True,) * 8).model)
    assert least_s > 48 * 6.0 + 7 * 2 * 6.0
    assert least_s <= contended_s(p, range(0, 49, 2)) <= 1.02 * least_s


def test_whether_the_largest_stage_runs_again_matters() -> None:
    """More than half of the layers run again. Either a stage of two does, in 4 s more for each micro-batch, or only
    stages of one layer do, and 26 stages are too few for that."""
    p = equal_layers(76.0)
    limits, stays = BlockLimits(p), (True,) * 8
    ways = [Largest(2, 2, reruns) for reruns in (None, True, False)]
    either_s, again_s, keeps_s = (
        optimum(TotalsModel(limits, 24, 48, stays, largest=way).model, relax=True) for way in ways
    )
    assert again_s > either_s + 7 * 3.9 and keeps_s > 1.004 * either_s
    either_s, again_s, keeps_s = (optimum(CountModel(limits, 26, stays, largest=way).model, relax=True) for way in ways)
    assert again_s > either_s + 1.0 and keeps_s == math.inf


def test_programs_keep_no_more_blocks_than_they_may() -> None:
    """Each layer that runs again takes 2 s longer. Of each device's six one does: 8 micro-batches pass 8 of them."""
    p = equal_layers(600.0)
    limits, stays = BlockLimits(p), (True,) * 8
    for make in (
        lambda kept: TotalsModel(limits, 24, 24, stays, kept=kept),
        lambda kept: CountModel(limits, 24, stays, kept=kept),
    ):
        all_s, fewer_s = (optimum(make(kept).model, relax=True) for kept in (math.inf, 40))
        assert all_s + 7 * 2.0 < fewer_s <= all_s + (8 + 8 - 1) * 2.0


def test_without_trials_a_node_takes_fewer_iterations() -> None:
    devices = ([1.0] * 4, [0, 1] * 2, [76.0] * 4)
    p = problem([0] * 24, *devices, micro_batches=8, seconds=(2.0,), weights=(1.0,), shared=1.0, rate=0.05)
    iterations = []
    for trials in (True, False):
        model = CountModel(BlockLimits(p), 14, (True,) * 4, integer=True).model
        if not trials:
            forbid_trials(model)
        model.optimize(max_nodes=1)
        iterations.append(model.solver._get_int_info_value("simplex_iteration_count"))
    assert iterations[1] < 0.5 * iterations[0], iterations


def test_one_program_speaks_of_all_choices_of_resident_devices() -> None:
    p = equal_layers(110.0)
    limits, numbers = BlockLimits(p), (8, 48, (None,) * 8, 6)
    fractions, anywhere = TotalsModel(limits, *numbers), TotalsModel(limits, *numbers, anywhere=True)
    choice = TotalsModel(limits, 8, 48, (True, False, True, True, True, True, False, True))
    some_s, all_s, one_s = (optimum(each.model, relax=True) for each in (fractions, anywhere, choice))
    assert 1.05 * some_s < all_s <= one_s * (1 + 1e-9), (some_s, all_s, one_s)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(small_problems(most_blocks=6), st.booleans())
def test_models_bound_by_the_largest_stage(p: MipProblem, same: bool) -> None:
    check_largest(alike(p) if same else p)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(small_problems(most_blocks=8), st.booleans())
def test_models_bound_many_by_the_largest_stage(p: MipProblem, same: bool) -> None:
    check_largest(alike(p) if same else p)
