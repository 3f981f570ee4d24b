"""`choose-activations`: nothing moves without need, what is decided fits, and links decide how much is swapped."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compiler.capture.trace import trace_in
from penstock.compiler.models.named import find_model
from penstock.ir import ops
from penstock.ir.errors import DoesNotFit, PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.precision import Precision
from penstock.ir.program import profile_memory
from penstock.ir.verify import verify
from penstock.passes.decisions import Activations
from penstock.passes.draft import Draft
from penstock.passes.mapping.map_round_robin import MapRoundRobin
from penstock.passes.memory.choose_activations import ChooseActivations
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.partition.partition_balanced import PartitionBalanced
from penstock.passes.partition.partition_min_stage import PartitionMinStage
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    apply,
    assert_trains_like_eager,
    chain,
    draft_of,
    text_of,
    to_schedule,
    trace_case,
)
from penstock.tests.shown_elsewhere import slow_but

NAME = "choose-activations"


def schedule(
    memory: int = 64_000_000, stages: int = 6, devices: int = 1, ssd: str | None = "1GB", **more: Any
) -> Draft:
    hardware = Hardware.cpu(num_devices=devices, memory=memory, ssd=ssd, dram="100MB")
    graph = chain(depth=stages - 1, width=32, rows=128)
    passes = [Coarsen(), PartitionBalanced(stages=stages, inputs_leave=True), MapRoundRobin(), SchedulePipeline()]
    return apply(draft_of(graph, hardware, micro_batches=4, **more), *passes)


def op_names(draft: Draft) -> list[str]:
    return [node.target.name for program in draft.programs for node in program.ops()]  # type: ignore[union-attr]


def test_text(golden: Golden) -> None:
    draft = schedule(720_000, stages=4)
    p = ChooseActivations()
    apply(draft, p, InsertFetch(), InsertOptimizer(), memory=True)
    golden(draft.notes[NAME] + "\n" + text_of(draft), "auto")


def test_nothing_is_given_up_where_all_fits() -> None:
    for swap in (False, True):
        draft = schedule()
        assert ChooseActivations(swap=swap).plan(draft) == {"rematerialise": [], "activations": {}}
        assert draft.notes == {}


@pytest.mark.parametrize("memory", slow_but([720_000, 2_000_000], [720_000, 1_000_000, 1_400_000, 2_000_000]))
def test_none_is_plain_rematerialisation(memory: int) -> None:
    draft = schedule(memory)
    wanted = InsertRemat().plan(schedule(memory))
    assert ChooseActivations(to="none").plan(draft) == {"rematerialise": wanted, "activations": {}}


@pytest.mark.parametrize("to", slow_but(["ssd"], ["dram", "ssd"]))
def test_all_goes_where_it_is_told(to: str) -> None:
    draft = schedule(stages=8)
    p = ChooseActivations(to=to, share=1.0)
    decision = p.plan(draft)
    assert decision["rematerialise"] == [stage.spec.name for stage in draft.stages]
    for stage in draft.stages:
        row = decision["activations"][stage.spec.name]
        assert row.classes == [saved.name for saved in stage.spec.saved] and row.classes_to == to
    apply(draft, p, InsertFetch(), InsertOptimizer(), memory=True)
    assert ("write" in op_names(draft)) == (to == "ssd")
    assert "* " in draft.notes[NAME]


def test_a_share_of_nothing_keeps_no_class() -> None:
    decision = ChooseActivations(share=0.0).plan(schedule())
    assert len(decision["rematerialise"]) == 6
    assert not any(row.classes for row in decision["activations"].values())


@pytest.mark.slow
def test_device_moves_nothing() -> None:
    """Between all and nothing, classes fill what memory is left."""
    plain, classes = schedule(1_000_000, stages=8), schedule(1_000_000, stages=8)
    apply(plain, InsertRemat(), InsertFetch(), InsertOptimizer(), memory=True)
    p = ChooseActivations(to="device")
    decision = p.plan(classes)
    assert any(row.classes for row in decision["activations"].values())
    assert {(row.classes_to, row.inputs_to) for row in decision["activations"].values()} == {("device", "device")}
    apply(classes, p, InsertFetch(), InsertOptimizer(), memory=True)
    assert op_names(classes).count("offload") == op_names(plain).count("offload")  # gradients only


@pytest.mark.slow
def test_inputs_leave_where_they_do_not_fit() -> None:
    """Many micro-batches of many stages: their inputs alone exceed the device, which rematerialisation cannot help."""
    memory = 720_000
    plain, draft = schedule(memory, stages=12), schedule(memory, stages=12)
    with pytest.raises(VerifyError):
        apply(plain, InsertRemat(swap=True), InsertFetch(swap=True), InsertOptimizer(), memory=True)
    apply(draft, ChooseActivations(swap=True), InsertFetch(swap=True), InsertOptimizer(), memory=True)
    assert profile_memory(draft.programs[0]).peak_bytes[ops.DEVICE] <= memory


@pytest.mark.slow
def test_what_dram_cannot_hold_goes_to_ssd() -> None:
    small = Hardware.cpu(num_devices=1, memory=600_000, ssd="1GB", dram="600kB")
    draft = schedule(600_000, stages=12)
    draft.machine = small
    p = ChooseActivations(swap=True, tier="all")
    decision = p.plan(draft)
    memories = [row.inputs_to for row in decision["activations"].values()]
    assert "ssd" in memories and "dram" in memories
    apply(draft, p, InsertFetch(swap=True))
    assert profile_memory(draft.programs[0]).arenas[ops.DRAM] < 600_000


@settings(max_examples=8, deadline=None)
@given(
    st.integers(400_000, 2_500_000),
    st.integers(2, 9),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from(["auto", "device", "dram", "ssd"]),
    st.sampled_from([-1.0, 0.0, 0.4, 1.0]),
)
@pytest.mark.slow
def test_any_budget_fits_or_says_so(memory: int, stages: int, devices: int, swap: bool, to: str, share: float) -> None:
    """Where plain rematerialisation fits, so does what is chosen freely."""

    def fits(p: Any) -> bool:
        try:
            draft = schedule(memory, stages, devices)
            apply(draft, p, InsertFetch(swap=swap), InsertOptimizer())
            verify(draft.programs, draft.lane_hardware)
        except (DoesNotFit, VerifyError) as error:
            assert "missing" in str(error) or "budget" in str(error) or "memory" in str(error)
            return False
        return True

    chosen = fits(ChooseActivations(swap=swap, to=to, share=share))
    if to == "auto" and share < 0 and fits(InsertRemat(swap=swap)):
        assert chosen


def test_devices_that_are_alike_are_decided_once() -> None:
    draft = schedule(1_000_000, stages=12, devices=4)
    p = ChooseActivations(swap=True)
    decided, looks = p.plan(draft), []
    for program in draft.programs:
        machine = p.machine(draft, program)
        looks.append(machine.look(program))
        alone = p.on_one(program, machine).choices
        for spec in machine.specs:
            assert (spec.name in alone) == (spec.name in decided["rematerialise"])
            row = decided["activations"].get(spec.name)
            assert row is None or row == alone[spec.name]
    assert len(set(looks)) < len(looks)


def test_the_plan_can_be_applied_again() -> None:
    texts = []
    decision = None
    for _ in range(2):
        draft = schedule(800_000)
        p = ChooseActivations()
        decision = p.plan(draft) if decision is None else decision
        p.rewrite(draft, p.gather(p.split(decision)))
        texts.append(text_of(draft))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"to": "disk"}, "to='disk' is none of auto"), ({"tier": "x"}, "tier='x'"), ({"share": 2.0}, "share=2.0")],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PassError, match=message):
        ChooseActivations(**options).plan(schedule())


def test_ssd_without_one() -> None:
    with pytest.raises(PassError, match="no SSD"):
        ChooseActivations(to="ssd").plan(schedule(ssd=None))


@pytest.mark.parametrize(
    ("names", "data", "message"),
    [
        (["stage9"], {}, "names 'stage9'"),
        ([], {"stage0": Activations()}, "stage0, which keeps everything"),
        (["stage0"], {"stage0": Activations(classes=["x"])}, "keeps 'x'; its classes are"),
        (["stage0"], {"stage0": Activations.model_construct(inputs_to="disk")}, "inputs_to is 'disk', not one of"),
    ],
)
def test_plans_are_checked(names: list[str], data: dict[str, Activations], message: str) -> None:
    with pytest.raises(PassError, match=message):
        ChooseActivations().rewrite(schedule(), {"rematerialise": names, "activations": data})


def test_a_stage_that_reads_what_it_writes_keeps_everything() -> None:
    draft = apply(draft_of(trace_case("in_place")[0]), *to_schedule(2))
    assert ChooseActivations(to="dram", share=1.0).plan(draft)["rematerialise"] == ["stage1"]


@pytest.mark.slow
def test_two_devices_train_as_eager_pytorch_does() -> None:
    graph, batches = trace_case("wide_resnet")
    hardware = Hardware.cpu(num_devices=2, memory="500MB", ssd="1GB")
    draft = apply(draft_of(graph, hardware, micro_batches=3), *to_schedule(6))
    apply(draft, ChooseActivations(to="ssd", share=0.7), InsertFetch(swap=True), InsertOptimizer())
    assert "offload" in op_names(draft)
    assert_trains_like_eager(draft, batches)


# --- the paper's machine --------------------------------------------------------------------------------------------


def plan_for(batch: int, micro_batches: int, ssds: int, **options: Any) -> tuple[Draft, dict[str, Any]]:
    """GPT-3 13B on Fuyou's server (figure 9)."""
    shapes = {key: {"shape": [batch // micro_batches, 1024], "dtype": "int64"} for key in ("input_ids", "labels")}
    graph = trace_in(Precision.of("fp16"), find_model("gpt3-13b").on_meta(), shapes)
    hardware = Hardware.preset("fuyou-a100", ssds=ssds)
    draft = draft_of(graph, hardware, micro_batches=micro_batches, precision="fp16")
    for p in (Coarsen(), PartitionMinStage(inputs_leave=True), MapRoundRobin(), SchedulePipeline()):
        p.rewrite(draft, p.plan(draft))
    return draft, ChooseActivations(swap=True, tier="all", **options).plan(draft)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "micro_batches", "ssds", "is_positive"),
    [(64, 2, 12, True), (80, 4, 12, True), (32, 1, 12, False), (32, 1, 2, False)],
)
def test_the_papers_swap_amounts(batch: int, micro_batches: int, ssds: int, is_positive: bool) -> None:
    """Positive where computation bounds the backward, nothing beyond the stages' inputs where the disks do: at batch 32
    (Fuyou 5.6)."""
    draft, decision = plan_for(batch, micro_batches, ssds, to="ssd")
    classes = [row.classes for row in decision["activations"].values()]
    assert any(classes) == is_positive
    assert ("by compute in backward" in draft.notes[NAME]) == is_positive
