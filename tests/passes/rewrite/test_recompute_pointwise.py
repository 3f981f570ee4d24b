"""`recompute-pointwise`: plans train bit for bit as without it, blocks save less, and runs hold what was predicted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.compiler.strategies import STRATEGIES
from penstock.ir.machine.hardware import Hardware
from penstock.passes.base import Pass
from penstock.passes.draft import Draft
from penstock.passes.memory.choose_activations import ChooseActivations
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.rewrite.recompute_pointwise import RecomputePointwise
from penstock.passes.schedule.schedule_zero_bubble import ScheduleZeroBubble
from penstock.tests.passes.running import all_passes, apply, assert_trains_like_eager, draft_of, to_schedule, trace_case
from penstock.tests.shown_elsewhere import slow_but

MOBIUS = STRATEGIES["mobius"]


def through(*after: Pass, schedule: Pass | None = None, stages: int = 3) -> list[Pass]:
    head = to_schedule(stages)
    return [RecomputePointwise(), *(head if schedule is None else [*head[:-1], schedule]), *after]


def plan_for(name: str, *passes: Pass, **options: Any) -> Draft:
    return apply(draft_of(trace_case(name)[0], micro_batches=3, **options), *passes)


PIPELINES = {
    "kept": through(InsertRemat(), InsertFetch(), InsertOptimizer()),
    "swapped": through(InsertRemat(always=True), InsertFetch(swap=True), InsertOptimizer()),
    "zero bubble": through(InsertRemat(), InsertFetch(), InsertOptimizer(), schedule=ScheduleZeroBubble()),
    "moved": through(ChooseActivations(to="dram", share=1.0), InsertFetch(), InsertOptimizer()),
}


def assert_trains_as_without_it(name: str, passes: list[Pass]) -> None:
    """Like eager PyTorch but for the order in which gradients of tied weights add up; the same bits as without it."""
    plain, again = (
        assert_trains_like_eager(plan_for(name, *some), trace_case(name)[1], tolerance=1e-6).weights()
        for some in (passes[1:], passes)
    )
    assert all(torch.equal(plain[key], again[key]) for key in plain)


@pytest.mark.parametrize("pipeline", slow_but(("swapped",), ("kept", "swapped", "zero bubble", "moved")))
def test_training_is_bit_for_bit_that_without_it(pipeline: str) -> None:
    assert_trains_as_without_it("gpt2", PIPELINES[pipeline])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama", "t5", "mixtral", "wide_resnet", "in_place", "lstm", "vit", "custom_function"]
)
def test_every_kind_of_model_trains_as_without_it(name: str) -> None:
    assert_trains_as_without_it(name, [RecomputePointwise(), *all_passes(stages=2)])


def test_blocks_save_less_and_backward_reads_more() -> None:
    plain, again = (plan_for("gpt2", *passes) for passes in (all_passes(3), [RecomputePointwise(), *all_passes(3)]))
    for before, after in zip(plain.stages, again.stages, strict=True):
        assert after.spec.kept_bytes <= before.spec.kept_bytes and after.spec.pointwise_again
        assert after.spec.forward_flops == before.spec.forward_flops
    middle = [draft.stages[1].spec for draft in (plain, again)]
    assert middle[1].kept_bytes < 0.5 * middle[0].kept_bytes
    assert middle[1].backward_traffic_bytes > middle[0].backward_traffic_bytes


def test_a_plan_that_says_no_keeps_them() -> None:
    draft = draft_of(trace_case("gpt2")[0], micro_batches=3)
    apply(draft, *[RecomputePointwise(), *all_passes(3)], decisions={"pointwise_again": False})
    assert not any(stage.spec.pointwise_again for stage in draft.stages)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_run_holds_what_was_predicted(precision: str) -> None:
    """Within 1 %: a value that several blocks of a stage save is counted once in the run."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=256,
        )
    )  # fmt: skip
    ids = torch.randint(0, 256, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    peaks, losses = {}, {}
    for strategy in (MOBIUS, f"recompute-pointwise, {MOBIUS}"):
        job = penstock.compile(
            model, Hardware.cpu(num_devices=1, memory="1GB"), example_inputs=batch, strategy=strategy, micro_batches=1,
            optimizer=partial(torch.optim.SGD, lr=0.0), precision=precision,
        )  # fmt: skip
        losses[strategy] = job.step(batch)
        peaks[strategy] = (job.plan.predicted.peak_bytes["cpu0"], job.last.peak_bytes["cpu0"])
        job.close()
    (plain, _), (predicted, counted) = peaks.values()
    assert 0.99 * predicted <= counted <= predicted < 0.8 * plain
    assert len({loss.item() for loss in losses.values()}) == 1
