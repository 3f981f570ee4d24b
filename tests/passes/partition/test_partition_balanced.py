"""`partition-balanced`: the best contiguous cuts, and what fits."""

from __future__ import annotations

import dataclasses
import itertools
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.ir.errors import DoesNotFit, PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.ops import DEVICE
from penstock.ir.program import profile_memory
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.partition import partition_balanced
from penstock.passes.partition.layer_parts import layer_apart
from penstock.passes.partition.partition_balanced import PartitionBalanced, balanced_cuts
from penstock.passes.partition.slices import Slices, StageNeed
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.rewrite.split_experts import SplitExperts
from penstock.passes.rewrite.split_vocabulary import SplitVocabulary
from penstock.passes.schedule.schedule_async import ScheduleAsync
from penstock.tests.passes.running import all_passes, apply, chain, draft_of, trace_case
from penstock.tests.shown_elsewhere import slow_but


class Given:
    """Slices of blocks with given seconds per device and bytes, on devices with given budgets."""

    def __init__(self, times: list[list[float]], sizes: list[int], budgets: list[int]):
        self.blocks, self.times, self.sizes, self.budgets = sizes, times, sizes, budgets
        ends = range(len(sizes) + 1)
        fitting = ((a for a in range(end) if sum(sizes[a:end]) <= max(budgets)) for end in ends)
        self.earliest = [next(starts, end) for starts, end in zip(fitting, ends)]

    def stage_time_s(self, a: int, b: int, stage: int) -> float:
        return sum(self.times[stage % len(self.times)][a:b])

    def fits(self, a: int, b: int, stage: int, count: int) -> bool:
        return sum(self.sizes[a:b]) <= self.budgets[stage % len(self.budgets)]

    def times_s(self, starts: NDArray[np.int64], width: int, stage: int) -> NDArray[np.float64]:
        return np.array([self.stage_time_s(a, a + width, stage) for a in starts])

    def fitting(self, starts: NDArray[np.int64], width: int, stage: int, count: int) -> list[bool]:
        return [self.fits(a, a + width, stage, count) for a in starts]

    def slowest_s(self, cuts: list[int]) -> float:
        return max(self.stage_time_s(a, b, i) for i, (a, b) in enumerate(pairwise(cuts)))


@st.composite
def slices(draw: st.DrawFn) -> tuple[Given, int]:
    length, devices = draw(st.integers(1, 8)), draw(st.integers(1, 3))
    seconds = st.lists(st.integers(1, 9).map(float), min_size=length, max_size=length)
    sizes = draw(st.lists(st.integers(1, 9), min_size=length, max_size=length))
    budgets = draw(st.lists(st.integers(5, 40), min_size=devices, max_size=devices))
    times = draw(st.lists(seconds, min_size=devices, max_size=devices))
    return Given(times, sizes, budgets), draw(st.integers(1, length))


@settings(max_examples=300, deadline=None)
@given(slices())
def test_no_other_contiguous_partition_is_faster(case: tuple[Given, int]) -> None:
    given_slices, count = case
    length = len(given_slices.sizes)
    every = [[0, *inner, length] for inner in combinations(range(1, length), count - 1)]
    fitting = [c for c in every if all(given_slices.fits(a, b, i, count) for i, (a, b) in enumerate(pairwise(c)))]
    found = balanced_cuts(given_slices, count)  # type: ignore[arg-type]
    if not fitting:
        assert found is None
    else:
        assert found in fitting
        assert given_slices.slowest_s(found) == min(map(given_slices.slowest_s, fitting))


@st.composite
def any_slices(draw: st.DrawFn) -> Slices:
    """Slices of blocks whose runs need any number of bytes of memory, and a second each block."""
    length, budgets = draw(st.integers(1, 6)), draw(st.lists(st.integers(5, 30), min_size=1, max_size=2))
    own = Slices.__new__(Slices)
    own.blocks, own.devices, own.budgets = [None] * length, [None] * len(budgets), budgets  # type: ignore[list-item]
    own.inputs_leave, own.asynchronous, own.micro_batches = draw(st.booleans()), False, draw(st.integers(1, 3))
    rows = [[(draw(st.integers(1, 30)), draw(st.integers(0, 4))) for _ in range(end)] for end in range(length + 1)]
    own.needs = [[StageNeed(work, size) for work, size in row] for row in rows]
    able = ((a for a, need in enumerate(row) if need.work_bytes <= max(budgets)) for row in own.needs)
    own.earliest = [next(starts, length) for starts in able]
    own.time_s = [[float(block) for block in range(length + 1)] for _ in budgets]
    return own


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(any_slices())
def test_no_number_of_stages_that_fits_is_left_out(slices: Slices) -> None:
    length = len(slices.blocks)

    def fits(cuts: tuple[int, ...]) -> bool:
        stages = [*pairwise((0, *cuts, length))]
        return all(slices.fits(a, b, i, len(stages)) for i, (a, b) in enumerate(stages))

    able = [n for n in range(1, length + 1) if any(map(fits, combinations(range(1, length), n - 1)))]
    assert [n for n in range(1, length + 1) if balanced_cuts(slices, n)] == able
    for count in range(length + 1):
        least = slices.fewest(count)
        assert all(least is not None and n >= least for n in able if n >= count)


def test_numbers_of_stages_of_which_none_can_fit_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """More stages are more rounds of inputs: where one block has no room at some number of rounds, no more help."""
    draft = draft_of(trace_case("gpt2")[0], Hardware.cpu(1, memory="30kB"), micro_batches=64)
    apply(draft, Coarsen())
    tried: list[int] = []

    def note(slices: Slices, count: int) -> list[int] | None:
        tried.append(count)
        return balanced_cuts(slices, count)

    monkeypatch.setattr(partition_balanced, "balanced_cuts", note)
    with pytest.raises(DoesNotFit):
        PartitionBalanced().plan(draft)
    assert len(tried) < len(draft.blocks)


def test_needs_are_those_of_the_built_stages() -> None:
    """What the partition counts for a slice is what the program of that stage takes in backward, on every model."""
    for name in ("gpt2", "t5", "wide_resnet", "llama"):
        draft = draft_of(trace_case(name)[0], Hardware.cpu(num_devices=1), micro_batches=2)
        apply(draft, *all_passes(3)[:4])
        able = [s.spec.name for s in draft.stages if s.spec.rematerialisable]
        fetch = {s.spec.name: {} for s in draft.stages}
        apply(draft, *all_passes(3)[4:], decisions={"rematerialise": able, "fetch": fetch})
        counted, start = [], 0
        for stage, names in enumerate(draft.partition):
            counted.append(Slices(draft).need_bytes(start, start + len(names), stage, 3))
            start += len(names)
        peak = profile_memory(draft.programs[0]).peak_bytes[DEVICE]
        assert 0.85 * peak <= max(counted) <= 1.6 * peak, name


@pytest.mark.parametrize("name", slow_but(("gpt2",), ["gpt2", "t5"]))
def test_needs_in_an_asynchronous_pipeline_are_those_of_its_programs(name: str) -> None:
    """The inputs of d + 1 micro-batches, and more of what skips stages, but not of all that pass."""
    found = []
    for micro_batches in (4, 12):
        draft = draft_of(trace_case(name)[0], Hardware.cpu(num_devices=4), micro_batches=micro_batches)
        partition = PartitionBalanced(stages=4, asynchronous=True)
        apply(draft, Coarsen(), partition, MapRoundRobin(), ScheduleAsync())
        slices, ends = Slices(draft, asynchronous=True), [0, *itertools.accumulate(map(len, draft.partition))]
        counted = [slices.need_bytes(a, b, stage, 4) for stage, (a, b) in enumerate(pairwise(ends))]
        peaks = [profile_memory(program).peak_bytes[DEVICE] for program in draft.programs]
        assert all(0.85 * peak <= need <= 1.5 * peak for need, peak in zip(counted, peaks)), (counted, peaks)
        found.append(counted)
    assert found[0] == found[1]


def test_faster_devices_get_more_blocks() -> None:
    document = Hardware.cpu(num_devices=2).model_dump()
    document["devices"][1]["peak_flops"] = {k: 3 * v for k, v in document["devices"][0]["peak_flops"].items()}
    document["devices"][1]["memory_bandwidth"] *= 3
    document["devices"][1]["op_overhead_s"] /= 3
    draft = draft_of(chain(depth=8), Hardware.model_validate(document))
    apply(draft, *all_passes()[:2])
    assert [len(names) for names in draft.partition] == [2, 7]
    with pytest.raises(PassError, match=r"together=true needs equal devices; found 2 kinds.*order='0' names one"):
        PartitionBalanced(together=True).plan(draft)
    assert set(PartitionBalanced(together=True, order="1").plan(draft)["planned_for"]) == {1}


def test_the_fewest_stages_that_fit_are_taken_in_rounds_of_the_devices() -> None:
    counts = []
    for memory in ("10MB", "140kB", "80kB"):
        draft = draft_of(chain(depth=7, width=32), Hardware.cpu(num_devices=2, memory=memory), micro_batches=2)
        apply(draft, *all_passes()[:2])
        counts.append(len(draft.partition))
    assert counts == [2, 4, 8]


def test_more_devices_than_blocks_get_a_block_each() -> None:
    draft = apply(draft_of(chain(depth=1), Hardware.cpu(num_devices=4)), *all_passes())
    assert draft.partition == [["layers.0"], ["head"]]
    assert [len(list(p.ops())) > 0 for p in draft.programs] == [True, True, False, False]


def test_what_cannot_be_done_is_said() -> None:
    with pytest.raises(PassError, match="stages=9, but 5 blocks allow at most 5"):
        apply(draft_of(chain()), *all_passes(9)[:2])
    tiny = Hardware.cpu(num_devices=2, memory="20kB")
    with pytest.raises(DoesNotFit, match=r"block 'layers.0' alone needs .* the largest has 19.5 KiB") as raised:
        apply(draft_of(chain(width=32), tiny), *all_passes()[:2])
    assert raised.value.memory == "device" and raised.value.missing_bytes > 0
    small = Hardware.cpu(num_devices=2, memory="100kB")
    with pytest.raises(DoesNotFit, match=r"no contiguous partition into 2 stages fits.*Nearest that fits: stages=8"):
        apply(draft_of(chain(depth=7, width=32), small), *all_passes(2)[:2])


def test_a_device_that_is_too_small_for_most_blocks_is_named() -> None:
    machine = Hardware.cpu(num_devices=2, memory="4MB")
    devices = [machine.devices[0], machine.devices[1].model_copy(update={"name": "small", "memory_bytes": 20_000})]
    draft = draft_of(chain(depth=7, width=32), machine.model_copy(update={"devices": devices}), micro_batches=2)
    with pytest.raises(
        DoesNotFit, match=r"[78] of 8 blocks do not fit device 'small' even alone: it has 19.5 KiB"
    ) as e:
        apply(draft, *all_passes(4)[:2])
    assert e.value.memory == "device" and e.value.missing_bytes > 0


def test_a_shared_layer_is_counted_once() -> None:
    """Its weights are there once, however many blocks of a stage call it."""
    draft = draft_of(trace_case("gpt2")[0], Hardware.cpu(num_devices=1))
    apply(draft, Coarsen())
    whole = Slices(draft).needs[len(draft.blocks)][0]
    parameters = {id(p): 2 * p.nbytes for p in draft.graph.model.parameters()}
    saved = sum(b.cost.kept_bytes for b in draft.blocks)
    assert sum(parameters.values()) + saved < whole.work_bytes < 1.5 * (sum(parameters.values()) + saved)


def test_its_option_says_how_many_and_else_the_number_of_devices() -> None:
    draft = draft_of(chain(), Hardware.cpu(num_devices=2))
    apply(draft, Coarsen())
    assert len(PartitionBalanced(stages=3).plan(draft)["stages"]) == 3
    assert len(PartitionBalanced().plan(draft)["stages"]) == 2


@pytest.mark.slow
def test_parts_of_a_layer_are_together() -> None:
    """What is before and after the parts of a layer is of that layer; the next layer is for the next device. So are the
    parts of a table. What blocks are called plays no part."""
    draft = draft_of(trace_case("mixtral")[0], Hardware.cpu(num_devices=3))
    apply(draft, SplitVocabulary(parts=3), SplitExperts(parts=2), Coarsen())
    cut = PartitionBalanced(stages=len(draft.blocks), together=True)
    devices = [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 0, 1, 1, 1]
    assert cut.plan(draft)["planned_for"] == devices
    draft.blocks = [dataclasses.replace(block, name=f"b{i}") for i, block in enumerate(draft.blocks)]
    assert cut.plan(draft)["planned_for"] == devices
    for together, apart in ((True, ""), (False, "model.embed_tokens")):
        apply(draft, dataclasses.replace(cut, together=together), MapRoundRobin())
        assert layer_apart(draft) == apart
