"""Local search, bounds and the program over counts against brute force."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from penstock.passes.partition_mip.local_search import Objective, Search
from penstock.passes.partition_mip.problem import MipProblem
from penstock.passes.partition_mip.proof.closed_form import closed_form_s
from penstock.passes.partition_mip.proof.model import MOST_RUNS
from penstock.passes.partition_mip.proof.solve import prove
from penstock.passes.partition_mip.recurrence import contended_s, fits, literal_s
from penstock.passes.partition_mip.starts import Cuts, starts
from penstock.tests.passes.partition_mip.mip_instances import alike, problem, small_problems


def brute_force(p: MipProblem, objective: Objective = contended_s) -> float:
    """The best of all partitions."""
    return min(
        objective(p, (0, *inner, p.num_blocks))
        for count in range(p.num_blocks)
        for inner in itertools.combinations(range(1, p.num_blocks), count)
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(small_problems(most_blocks=12))
def test_all_partitions_of_few_blocks_are_tried(p: MipProblem) -> None:
    for objective in (contended_s, literal_s):
        found = Search(p, objective).run_all(range(1, p.num_blocks + 1))
        assert (found[0] if found else math.inf) == pytest.approx(brute_force(p, objective), rel=1e-3)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(small_problems())
def test_local_search_comes_close(p: MipProblem) -> None:
    best_s = brute_force(p)
    found = Search(p, contended_s).run(range(1, p.num_blocks + 1))
    assume(best_s < math.inf)
    assert found is not None and found[0] <= 1.05 * best_s
    assert fits(p, found[1]) and contended_s(p, found[1]) == found[0]


def test_the_best_partition_is_found_behind_worse_ones() -> None:
    """Moves that help end 6% above it."""
    kinds = [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    p = problem(kinds, [3.0, 1.7], [1, 1], [600.0, 60.0], micro_batches=3, rate=0.5)
    search = Search(p, contended_s)
    found = search.run(range(1, p.num_blocks + 1))
    assert found is not None and found[0] == pytest.approx(brute_force(p))
    assert len(search.known) < 2 ** (p.num_blocks - 1) / 4


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(small_problems(most_blocks=7))
def test_no_partition_is_faster_than_a_lower_bound(p: MipProblem) -> None:
    counts = range(1, p.num_blocks + 1)
    best_s = brute_force(p)
    assume(best_s < math.inf)
    search = Search(p, contended_s)
    search.run(counts)
    proof = prove(search, counts, 5.0)
    assert not proof.trouble.startswith("the solver failed"), proof.trouble
    assert proof.lower_s <= best_s * (1 + 1e-6) <= min(search.best.values())[0] * (1 + 2e-6)
    for count in counts:
        rows = [(0, *inner, p.num_blocks) for inner in itertools.combinations(range(1, p.num_blocks), count - 1)]
        for objective in (contended_s, literal_s):
            least_s = min(objective(p, cuts) for cuts in rows)
            assert closed_form_s(p, count, objective is literal_s) <= least_s * (1 + 1e-9)


class Still(Search):
    """Learns nothing from the proof but what this tries."""

    def climb(self, cuts: Cuts, counts: set[int]) -> None:
        pass


def check_from_a_poor_partition(p: MipProblem) -> None:
    """What is much better than the only partition known lies in some part of the proof, whichever it is."""
    fitting = [cuts for count in range(1, p.num_blocks + 1) for cuts in starts(p, count) if fits(p, cuts)]
    assume(fitting)
    search = Still(p, contended_s)
    search.seconds(max(fitting, key=lambda cuts: contended_s(p, cuts)))
    proof = prove(search, range(1, p.num_blocks + 1), 5.0)
    assert not proof.trouble.startswith("the solver failed"), proof.trouble
    assert proof.lower_s <= brute_force(p) * (1 + 1e-6)


# The best partition has fewer stages than others that are bounded with it: a device's first fetch waits for no message.
FIRST_FETCH = problem([1, 3, 0], [1.0, 1.0], [0, 0], [25.0, 25.0], micro_batches=1, rate=0.5)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(small_problems(most_blocks=6), st.booleans())
@example(FIRST_FETCH, False)
def test_a_proof_that_begins_with_a_poor_partition(p: MipProblem, same: bool) -> None:
    check_from_a_poor_partition(alike(p) if same else p)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(small_problems(most_blocks=8), st.booleans())
def test_proofs_that_begin_with_poor_partitions(p: MipProblem, same: bool) -> None:
    check_from_a_poor_partition(alike(p) if same else p)


@pytest.mark.slow
def test_many_runs_of_unlike_blocks_are_bounded_by_programs() -> None:
    p = problem([0, 1] * 10, [1.0, 1.7], [0, 1], [60.0, 150.0], micro_batches=4, rate=4.0)
    assert len(p.runs()) > MOST_RUNS
    counts = range(1, p.num_blocks + 1)
    search = Search(p, contended_s, 0.3)
    search.run(counts)
    proof = prove(search, counts, 1.0)
    assert "programs over totals" in proof.how
    best_s = min(search.best.values())[0]
    assert min(closed_form_s(p, count) for count in counts) < 0.9 * proof.lower_s <= 0.9 * best_s


@pytest.mark.slow
def test_many_layers_on_many_devices() -> None:
    """96 identical layers with an embedding and a head, 8 devices, two root complexes: proven to 2% by 10 s of work."""
    p = problem(
        [1, *[0] * 96, 2],
        speeds=[1.0] * 8,
        complexes=[0, 1] * 4,
        budgets=[22.5] * 8,
        micro_batches=8,
        seconds=(0.04, 0.01, 0.06),
        weights=(1.2, 0.6, 0.7),
        barrier=True,
        rate=13.1,
    )
    counts = range(8, 99)
    search = Search(p, contended_s, 5.0)
    assert search.run(counts) is not None
    proof = prove(search, counts, 10.0 - search.work.seconds)
    best_s = min(search.best.values())[0]
    assert proof.lower_s <= best_s <= proof.lower_s / 0.98, proof
