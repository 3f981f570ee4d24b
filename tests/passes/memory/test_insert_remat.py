"""`insert-remat`: saved tensors are given up only where memory is short, and that lowers the peak."""

from __future__ import annotations

import itertools

import pytest

from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory
from penstock.passes.draft import Draft
from penstock.passes.memory.insert_remat import InsertRemat, stages_to_rematerialise
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import all_passes, apply, chain, draft_of, text_of, to_schedule, trace_case

ROWS = 64


def schedule(memory: str = "64MB", stages: int = 2) -> Draft:
    """Saved tensors are most of what this takes."""
    hardware = Hardware.cpu(num_devices=1, memory=memory)
    graph = chain(depth=5, width=16, rows=ROWS)
    return apply(draft_of(graph, hardware, micro_batches=4), *to_schedule(stages))


def peak(draft: Draft) -> int:
    return profile_memory(draft.programs[0]).peak_bytes[ops.DEVICE]


def test_text(golden: Golden) -> None:
    draft = draft_of(chain(depth=2), micro_batches=2)
    apply(draft, *to_schedule(3), InsertRemat(), decisions={"rematerialise": ["stage0", "stage1"]})
    golden(text_of(draft), "two-of-three")


def test_nothing_is_given_up_where_all_fits() -> None:
    assert InsertRemat().plan(schedule()) == []


def test_nothing_is_given_up_where_that_is_asked_though_memory_is_short() -> None:
    draft = schedule(memory="200kB")
    assert InsertRemat().plan(draft)
    assert InsertRemat(never=True).plan(draft) == []
    assert list(InsertRemat(never=True).label(())) == ["none computed again"]
    with pytest.raises(PassError, match="found always=true and never=true; allowed is one of them"):
        InsertRemat(always=True, never=True)


def test_it_lowers_the_peak_and_costs_a_forward() -> None:
    draft = schedule(stages=3)
    before, slow = peak(draft), simulate(draft.programs, draft.lane_hardware).step_s
    apply(draft, InsertRemat(), decisions={"rematerialise": ["stage0", "stage1", "stage2"]})
    kept = sum(s.spec.kept_bytes for s in draft.stages)
    assert peak(draft) < before - 2 * kept
    assert 1.1 * slow < simulate(draft.programs, draft.lane_hardware).step_s < 1.6 * slow


def test_only_as_much_as_needed_is_given_up_and_the_result_fits() -> None:
    """As memory shrinks, more is computed again, never more than the least that fits."""
    whole = schedule(stages=3)
    states = sum(8 * s.spec.trained_params for s in whole.stages)
    full = peak(whole) + states
    specs = [s.spec for s in whole.stages]
    seconds = dict(zip((spec.name for spec in specs), (2.0, 1.5, 1.0)))

    def lacks_bytes(names: tuple[str, ...], budget: int) -> int:
        draft = apply(schedule(stages=3), InsertRemat(), decisions={"rematerialise": list(names)})
        return peak(draft) + states - budget

    took = []
    for share in (1.0, 0.9, 0.7):
        budget = int(full * share)
        names = stages_to_rematerialise(whole.programs[0], specs, seconds, budget)
        assert lacks_bytes(tuple(names), budget) <= 0
        took.append(sum(seconds[name] for name in names))
        for number in range(4):
            for others in itertools.combinations(seconds, number):
                if sum(seconds[name] for name in others) < took[-1]:
                    assert lacks_bytes(others, budget) > 0
    assert took[0] == 0 < took[1] < took[2]


def test_swapped_stages_are_rematerialised_but_the_last_may_keep() -> None:
    """With more memory, the last stage keeps its saved tensors beside all early fetches."""
    graph = chain(depth=7, rows=ROWS)
    lasts = []
    for memory in (140_000, 180_000, 220_000):
        draft = draft_of(graph, Hardware.cpu(num_devices=1, memory=memory), micro_batches=4)
        apply(draft, *to_schedule(4))
        decision = InsertRemat().plan(draft)
        assert decision[:3] == ["stage0", "stage1", "stage2"]
        lasts.append("stage3" in decision)
        apply(draft, *all_passes(4)[4:], memory=True)
        assert any(n.target is ops.fetch for n in draft.programs[0].ops())
    assert lasts == [True, True, False]


def test_a_stage_that_reads_what_it_writes_cannot() -> None:
    draft = apply(draft_of(trace_case("in_place")[0]), *to_schedule(2))
    assert [s.spec.rematerialisable for s in draft.stages] == [False, True]
    with pytest.raises(PassError, match="stage0 writes a buffer that its forward reads"):
        InsertRemat().rewrite(draft, ["stage0"])


def test_batch_norm_can() -> None:
    draft = apply(draft_of(trace_case("wide_resnet")[0]), *to_schedule())
    assert all(s.spec.rematerialisable for s in draft.stages)
