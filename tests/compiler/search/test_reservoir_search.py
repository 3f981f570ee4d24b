"""The search on machines with SSDs: it uses them where DRAM is short, and its plans run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.capture.trace import trace
from penstock.compiler.search.attempts import Attempts, Wishes
from penstock.compiler.search.bounds import machine_bound
from penstock.compiler.search.candidate import PLAIN, RESERVOIR, Candidate
from penstock.compiler.search.candidates import fewer, mappings, partitions, scouts, stage_counts
from penstock.compiler.search.compiled import CandidateCompiler
from penstock.compiler.search.fit import check_fit, check_lasting, check_states_fit
from penstock.compiler.search.host_memory import host_needs
from penstock.compiler.search.search import search
from penstock.ir import ops
from penstock.ir.errors import DoesNotFit, PassError, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import profile_memory
from penstock.passes.draft import Options
from penstock.passes.memory.choose_activations import ChooseActivations
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_ssd import InsertSsd
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.tests.compiler.eager_baseline import zoo_case

ADAMW = partial(torch.optim.AdamW, lr=1e-3)
SMALL: dict[str, Any] = {"memory": "260kB", "dram": "400kB", "ssd": "20MB"}


THREE_STAGES = PartitionBalanced(stages=3)


def compiler_for(hardware: Hardware, count: int = 4, **options: Any) -> CandidateCompiler:
    model, batch = zoo_case("gpt2")
    graph = trace(model, micro_batch_spec(batch, count))
    return CandidateCompiler(graph, hardware, Options(micro_batches=count, **options))


@pytest.mark.slow
def test_where_dram_is_short_the_plan_lies_on_ssd_and_trains_as_predicted(tmp_path: Path) -> None:
    model, batch = zoo_case("gpt2")
    machine = Hardware.cpu(1, **{**SMALL, "dram": "370kB"}, ssd_dir=tmp_path)
    with penstock.compile(model, machine, example_inputs=batch, optimizer=ADAMW) as job:
        predicted = job.plan.predicted
        assert predicted is not None and job.plan.decisions.ssd.stages and predicted.moved_bytes["ssd0.write"] > 0
        assert all(peak <= predicted.budget_bytes[memory] for memory, peak in predicted.peak_bytes.items())
        losses = [float(job.step(batch)) for _ in range(3)]
        assert losses[-1] < losses[0]
        with pytest.raises(PlanError, match=r"its results lack .* of DRAM"):  # of which the step leaves 2%
            job.evaluate(batch)
        assert job.last is not None
        for memory in ("cpu0", "dram0", "ssd0"):
            assert job.last.peak_bytes[memory] <= predicted.peak_bytes[memory]
        assert job.last.peak_bytes["ssd0"] == predicted.peak_bytes["ssd0"]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_candidates_without_ssd_are_refused_before_they_are_made() -> None:
    """By a bound that is no more than what their programs would need."""
    compiler = compiler_for(Hardware.cpu(1, **SMALL))
    with pytest.raises(DoesNotFit, match=r"dram0 .* weights .*, states .*") as early:
        compiler.place(PLAIN.with_(THREE_STAGES))
    wide = compiler_for(Hardware.cpu(1, **{**SMALL, "dram": "100MB"}))
    draft = wide.finish(wide.place(PLAIN.with_(THREE_STAGES))).draft
    draft.machine = compiler.hardware
    with pytest.raises(DoesNotFit) as late:
        check_fit(draft)
    with pytest.raises(DoesNotFit):
        check_lasting(draft)
    assert 0 < early.value.missing_bytes <= late.value.missing_bytes
    compiler.place(RESERVOIR.with_(THREE_STAGES))


@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(Hardware.cpu(1, **SMALL), id="one", marks=pytest.mark.slow),
        pytest.param(Hardware.cpu(2, memory="260kB", dram="700kB", ssd="20MB"), id="two", marks=pytest.mark.slow),
        pytest.param(Hardware.cpu(1, memory="2MB", dram="2MB", ssd="20MB"), id="roomy"),
    ],
)
@pytest.mark.slow
def test_bounds_are_no_higher_than_the_simulation(machine: Hardware) -> None:
    """Whatever lies on SSD."""
    compiler = compiler_for(machine, 8)
    count = 0
    for cut in partitions(compiler.lane(RESERVOIR), RESERVOIR):
        for tier in ("auto", "states", "all"):
            placed_by = (cut, mappings(machine)[0])
            candidate = RESERVOIR.with_(*placed_by, InsertSsd(tier=tier), InsertFetch(swap=True))
            try:
                placed = compiler.place(candidate)
                bound = placed.bound()
                step_s = compiler.finish(placed).step_s
            except (DoesNotFit, PassError, PlanError):
                continue
            assert 0 < bound.seconds <= step_s * (1 + 1e-9), (candidate, bound)
            assert machine_bound(placed.draft).seconds <= step_s * (1 + 1e-9)
            count += 1
    assert count >= 3


def test_disks_bound_a_step_where_they_must() -> None:
    """Slow disks and states that must lie there: the bound is what they take, and says so."""
    slow = Hardware.cpu(1, **SMALL).with_(ssds=[{"size_bytes": "20MB", "read_bandwidth": 1e5, "write_bandwidth": 5e4}])
    compiler = compiler_for(slow, 8)
    placed = compiler.place(RESERVOIR.with_(THREE_STAGES))
    states = sum(8 * stage.spec.trained_params for stage in placed.draft.stages)
    weights = sum(stage.spec.weight_bytes for stage in placed.draft.stages)
    beyond = states + weights - slow.dram_budget_bytes()
    assert placed.bound().by == "ssd0" and placed.bound().seconds == pytest.approx(beyond / 1e5 + beyond / 5e4)
    everything = machine_bound(placed.draft)
    assert everything.by != "SSDs" or everything.seconds <= placed.bound().seconds


def test_what_must_lie_on_ssd_is_known_before_tracing() -> None:
    model, _ = zoo_case("gpt2")
    options = Options(state_bytes_per_param=8)
    need = 12 * sum(p.numel() for p in model.parameters())
    machine = Hardware.cpu(1, memory="100kB", dram="100kB", ssd="20MB")
    assert check_states_fit(model, machine, options) == check_states_fit(model, Hardware.cpu(1), options) == need
    with pytest.raises(DoesNotFit, match=r"dram0 .* usable, ssd0 97\.7 KiB usable.* missing") as caught:
        check_states_fit(model, Hardware.cpu(1, memory="100kB", dram="100kB", ssd=111_112), options)
    assert caught.value.memory == "ssd0" and abs(caught.value.missing_bytes - (need - 300_000)) < 2


def test_where_memories_are_too_small_nothing_is_cut_without_ssds() -> None:
    """Not even a graph is asked for. On a machine with more DRAM, as one is looked for that fits, the same is tried."""
    wishes = Wishes(None, 4, 8, Options(), lasting_bytes=1_000_000)
    found = Attempts(lambda _: pytest.fail("it is traced"), Hardware.cpu(1, **SMALL), wishes).attempt(4, PLAIN)
    assert isinstance(found.reason, DoesNotFit) and found.reason.memory == "dram0"
    assert found.reason.missing_bytes == 1_000_000 - 660_000 and "keep nothing on SSD" in str(found.reason)
    more = Hardware.cpu(1, **{**SMALL, "dram": "1MB"})
    assert Attempts(lambda _: pytest.fail("it is traced"), more, wishes).excess_bytes == 0


@pytest.mark.slow
def test_too_small_disks_are_named_with_what_would_do() -> None:
    model, batch = zoo_case("gpt2")
    machine = Hardware.cpu(1, **{**SMALL, "ssd": "60kB"})
    with pytest.raises(DoesNotFit, match=r"Tried, and fits: this hardware with ssds=\d") as caught:
        penstock.compile(model, machine, example_inputs=batch, optimizer=ADAMW)
    assert set(caught.value.nearest) == {"ssds"}
    assert penstock.compile(model, machine.with_(**caught.value.nearest), example_inputs=batch, optimizer=ADAMW)


@pytest.mark.slow
def test_a_strategy_without_ssd_is_told_of_one_with() -> None:
    model, batch = zoo_case("gpt2")
    with pytest.raises(DoesNotFit, match=r'dram0 .*Tried, and fits: strategy="auto"') as caught:
        penstock.compile(
            model, Hardware.cpu(1, **SMALL), example_inputs=batch, optimizer=ADAMW, strategy="balanced", micro_batches=8
        )
    assert caught.value.nearest == {"strategy": "auto"}


@pytest.mark.slow
def test_needs_are_those_of_the_programs_by_what_they_are_for() -> None:
    compiler = compiler_for(Hardware.cpu(1, **SMALL), 8)
    draft = compiler.finish(compiler.place(RESERVOIR.with_(THREE_STAGES))).draft
    needs = {need.memory: need for need in host_needs(draft.programs, draft.lane_hardware)}
    profile = profile_memory(draft.programs[0])
    assert needs["dram0"].step_bytes == profile.peak_bytes[ops.DRAM]
    assert needs["ssd0"].step_bytes == profile.peak_bytes[ops.SSD] and "states" in needs["ssd0"].parts
    assert needs["dram0"].parts["read and offloaded values"] == profile.arenas[ops.DRAM]
    assert profile.arenas[ops.DRAM] % 4096 == 0  # whole pages
    largest = max(4 * sum(p.numel for p in stage.spec.params) for stage in draft.stages)
    assert needs["dram0"].loading_bytes > largest + profile.persistent.total(ops.DRAM)


@pytest.mark.slow
def test_without_ssds_none_are_asked_for() -> None:
    model, batch = zoo_case("gpt2")
    plan = penstock.compile(model, Hardware.cpu(1, "260kB"), example_inputs=batch, optimizer=ADAMW).plan
    on_ssd = [rival for rival in plan.rivals if "insert-ssd" in rival.passes]
    assert {rival.name.partition(",")[0] for rival in on_ssd} == {"fuyou", "mobius-ssd"}
    assert all(rival.reason == "needs SSDs, of which there are none" for rival in on_ssd)


@pytest.mark.slow
def test_with_room_in_dram_ssds_are_tried_but_not_needed() -> None:
    model, batch = zoo_case("gpt2")
    machine = Hardware.cpu(1, "220kB", dram="20MB", ssd="20MB")
    plan = penstock.compile(model, machine, example_inputs=batch, optimizer=ADAMW).plan
    bare = penstock.compile(model, machine.with_(ssds=0), example_inputs=batch, optimizer=ADAMW).plan
    assert plan.predicted is not None and bare.predicted is not None
    assert plan.predicted.step_s <= bare.predicted.step_s * 1.0001
    tried = [*(rival.passes for rival in plan.rivals if rival.step_s is not None), plan.passes]
    assert any("overlap-optimizer" in line and "insert-remat" in line for line in tried)
    assert any("choose-activations{tier=none}" in line for line in tried)


def test_activations_stay_in_dram_that_holds_everything() -> None:
    """Also where buffers of whole stages, which states on disks would need, would not fit beside them."""
    machine = Hardware.cpu(2, memory="300kB", dram="900kB", ssd="20MB")
    compiler = compiler_for(machine)
    cut = PartitionBalanced(stages=4)
    chosen = compiler.finish(compiler.place(RESERVOIR.with_(cut, ChooseActivations(swap=True), InsertFetch(swap=True))))
    moved = chosen.timeline.moved_bytes
    assert moved["rc0.0.up"] > 0 and not moved.get("ssd0.write")
    assert chosen.draft.notes["insert-ssd"] == "DRAM holds everything"
    tight = compiler_for(Hardware.cpu(2, memory="300kB", dram="500kB", ssd="20MB"))
    chosen = tight.finish(tight.place(RESERVOIR.with_(cut, ChooseActivations(swap=True), InsertFetch(swap=True))))
    assert chosen.timeline.moved_bytes["ssd0.write"] > 0
    assert chosen.draft.notes["insert-ssd"].startswith("DRAM lacks ")


def with_order(candidates: list[Candidate]) -> list[Candidate]:
    return [c for c in candidates if isinstance(c.partition, PartitionBalanced) and c.partition.order]


def test_the_fewest_stages_that_fit_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each machine; where inputs leave the device, there may be fewer."""
    compiler = compiler_for(Hardware.cpu(1, **SMALL))
    lane = compiler.lane(PLAIN)
    counts = [stage_counts(lane, inputs_leave=leave) for leave in (False, True)]
    with monkeypatch.context() as patch:
        patch.setattr(PartitionBalanced, "plan", lambda self, draft: pytest.fail("they are counted again"))
        assert counts == [stage_counts(lane, inputs_leave=leave) for leave in (False, True)]
    other = CandidateCompiler(compiler.graph, Hardware.cpu(1, **{**SMALL, "memory": "4MB"}), compiler.options)
    assert min(stage_counts(other.lane(PLAIN))) < min(counts[0])


@pytest.mark.slow
def test_scouts_of_a_reservoir_also_use_fewer_devices() -> None:
    """Half of them, a quarter, under all root complexes; the plan says so, and the idle ones need nothing."""
    hardware = Hardware.preset("mobius-topo2+2")
    assert fewer(hardware) == ["0 2", "0"] and fewer(Hardware.cpu(1)) == []
    compiler = compiler_for(Hardware.cpu(4, memory="400kB", dram="700kB", ssd="20MB"), 8)
    orders = with_order(scouts(compiler.lane(RESERVOIR), RESERVOIR))
    assert len(orders) == 2 and not with_order(scouts(compiler.lane(PLAIN)))
    draft = compiler.finish(compiler.place(orders[0])).draft
    assert set(draft.devices) == {0, 1}
    assert [profile_memory(program).peak_bytes[ops.DEVICE] for program in draft.programs[2:]] == [0, 0]


@pytest.mark.slow
def test_a_search_without_hints_finds_the_reservoir_too() -> None:
    model, batch = zoo_case("gpt2")
    graph = trace(model, micro_batch_spec(batch, 4))
    machine = Hardware.cpu(1, **SMALL)
    found = search(lambda _: graph, machine, Wishes(None, 4, 8, Options(micro_batches=4)))
    assert found.best.decisions["ssd"].stages
