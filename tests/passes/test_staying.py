"""Stages' trained parameters that stay on the device, and that every count of memory knows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.compiler.capture.trace import trace
from penstock.ir import ops
from penstock.ir.errors import PassError, VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Interface, StageSpec, infer_all, place_frees, profile_memory
from penstock.ir.verify import verify
from penstock.passes import staying
from penstock.passes.draft import Draft
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.passes.staying import choose_staying, kept_bytes
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import Chain, apply, draft_of, text_of, to_schedule


def frozen_but(what: str, memory: str = "8MB", **options: object) -> Draft:
    """A chain whose parameters are frozen but for those with a word in their names, with programs."""
    with torch.device("meta"):
        model = Chain(3, 64)
    for name, param in model.named_parameters():
        param.requires_grad_(what in name)
    graph = trace(model, {"x": torch.randn(2, 64), "labels": torch.zeros(2, dtype=torch.int64)})
    return apply(draft_of(graph, Hardware.cpu(1, memory=memory), micro_batches=2, **options), *to_schedule(4))


def names(draft: Draft) -> set[str]:
    return {stage.spec.name for stage in draft.stages if stage.spec.staying}


def test_norms_of_a_frozen_chain_stay_and_come_after_what_moves() -> None:
    draft = frozen_but("norm")
    assert names(draft) == {"stage0", "stage1", "stage2"}  # the head is frozen
    spec = draft.stages[0].spec
    stays = [param.stays for param in spec.params]
    assert stays == [param.requires_grad for param in spec.params] == sorted(stays)
    assert spec.all_weight_bytes == spec.weight_bytes + 2 * 512
    assert spec.part_bytes(len(spec.moving)) == spec.weight_bytes


def test_large_trained_parts_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(frozen_but("down")) == set()  # half of each stage
    assert names(frozen_but("")) == set()  # all of it
    draft = frozen_but("norm")
    taken = sum(kept_bytes(draft, stage.spec) for stage in draft.stages)
    for room, stays in ((taken, 3), (taken - 1, 0)):
        monkeypatch.setattr(staying, "SHARE", room / draft.machine.devices[0].budget_bytes)
        assert len(names(frozen_but("norm"))) == stays


def test_stages_that_lanes_share_have_none() -> None:
    draft = frozen_but("norm")
    draft.stages = [replace(stage, spec=plain(stage.spec)) for stage in draft.stages]
    assert choose_staying(draft)
    draft.mesh = draft.mesh.model_copy(update={"shards": 2})
    assert not choose_staying(draft)


def test_a_plan_decides_which_stay() -> None:
    def draft_of_plan(staying: list[str] | None) -> Draft:
        draft = frozen_but("norm")
        draft.stages = [replace(stage, spec=plain(stage.spec)) for stage in draft.stages]
        return apply(draft, SchedulePipeline(), decisions={"schedule": {"schedule": "fill-drain", "staying": staying}})

    assert names(draft_of_plan(["stage1"])) == {"stage1"} and not names(draft_of_plan([]))
    assert names(draft_of_plan(None)) == {"stage0", "stage1", "stage2"}  # as in plans of earlier versions
    with pytest.raises(PassError, match="staying names 'stage3'; the stages able to are stage0, stage1, stage2"):
        draft_of_plan(["stage3"])


def plain(spec: StageSpec) -> StageSpec:
    return replace(spec, params=tuple(replace(param, stays=False) for param in spec.params))


def swapping_job(draft: Draft) -> Draft:
    every = [stage.spec.name for stage in draft.stages]
    decisions = {"rematerialise": every, "fetch": {name: {} for name in every}}
    return apply(draft, InsertRemat(), InsertFetch(), InsertOptimizer(), decisions=decisions)


def test_text(golden: Golden) -> None:
    golden(text_of(swapping_job(frozen_but("norm"))), "fetched")


def test_memory_counts_them_on_the_device() -> None:
    draft = swapping_job(frozen_but("norm"))
    (program,) = draft.programs
    profile = profile_memory(program)
    stays = [stage.spec for stage in draft.stages if stage.spec.staying]
    assert profile.persistent.device["weights"] == sum(spec.staying_bytes for spec in stays)
    assert profile.persistent.device["states"] == sum(program.interface.state_bytes(spec) for spec in stays)
    assert profile.persistent.dram["weights"] == sum(stage.spec.weight_bytes for stage in draft.stages)
    assert not profile.persistent.dram["states"]
    fetched = [node.meta["type"] for node in program.ops() if node.target is ops.fetch]
    assert fetched and all(v.bytes == program.interface.stages[v.stage].weight_bytes for v in fetched)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16-true"])
def test_early_fetches_leave_room_for_updates(precision: str) -> None:
    """Whatever the device's memory: what fits without early fetches fits with those that are chosen."""
    chosen = set()
    for kilobytes in range(90, 330, 24):
        draft = frozen_but("norm", memory=f"{kilobytes}kB", precision=precision)
        every = [stage.spec.name for stage in draft.stages]
        apply(draft, InsertRemat(), decisions={"rematerialise": every})
        plain, early = draft.programs, InsertFetch(swap=True).plan(draft)
        for decision in ({name: {} for name in every}, early):
            draft.programs = [program.copy() for program in plain]
            apply(draft, InsertFetch(), InsertOptimizer(), decisions={"fetch": decision})
            peak = profile_memory(draft.programs[0]).peak_bytes[ops.DEVICE]
            if peak > draft.machine.devices[0].budget_bytes:
                assert decision is not early, f"{kilobytes} kB"
                break
        chosen.add(str(early))
    assert len(chosen) > 2


def test_gradients_that_leave_are_refused() -> None:
    draft = swapping_job(frozen_but("norm"))
    graph = draft.programs[0].graph
    step = next(node for node in graph.nodes if node.target is ops.step)
    with graph.inserting_before(step):
        gone = graph.call_function(ops.offload, (step.args[1],))
    gone.name = "gone"
    step.args = (step.args[0], gone)
    infer_all(draft.programs[0])
    place_frees(draft.programs[0])
    with pytest.raises(VerifyError, match="but what is trained of it stays, so it is stepped in device"):
        verify(draft.programs, draft.lane_hardware)


def test_an_interface_that_contradicts_itself_is_unreadable() -> None:
    interface = swapping_job(frozen_but("norm")).programs[0].interface
    assert Interface.from_json(interface.to_json()) == interface
    spec = interface.stages["stage0"]
    for wrong in (
        replace(spec, params=spec.params[::-1]),
        replace(spec, params=tuple(replace(p, requires_grad=False) for p in spec.params)),
    ):
        with pytest.raises(ValueError, match="stay"):
            Interface.from_json(replace(interface, stages={**interface.stages, "stage0": wrong}).to_json())
