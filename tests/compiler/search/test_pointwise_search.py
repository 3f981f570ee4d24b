"""The search computes pointwise results again where memory is short, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.ir.errors import DoesNotFit
from penstock.ir.machine.hardware import Hardware

AFTER = (
    "coarsen, partition-min-stage, map-round-robin, schedule-pipeline, insert-remat{always=true}, "
    "insert-fetch{swap=true}, insert-optimizer"
)
BATCH = {name: torch.empty(4, 256, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}


def plan_for(memory: str, **options: Any) -> penstock.Plan:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=2, hidden_size=64, intermediate_size=512, num_attention_heads=4, vocab_size=64
            )
        )
    machine = Hardware.cpu(num_devices=1, memory=memory)
    return penstock.compile(model, machine, example_inputs=BATCH, micro_batches=1, **options).plan


@pytest.mark.slow
def test_it_fits_what_else_would_not() -> None:
    needed = plan_for("100MB", strategy="drop-masks, recompute-pointwise, " + AFTER).predicted.peak_bytes["cpu0"]
    memory = f"{1.02 * needed / 1e6:.3f}MB"
    with pytest.raises(DoesNotFit):
        plan_for(memory, strategy="drop-masks, " + AFTER)
    assert plan_for(memory).decisions.pointwise_again


@pytest.mark.slow
def test_a_device_with_room_keeps_everything() -> None:
    plan = plan_for("100MB")
    assert not plan.decisions.pointwise_again
    assert not any("recompute-pointwise" in rival.passes for rival in plan.rivals)


@pytest.mark.slow
def test_what_compiled_stages_rule_out_is_not_chosen() -> None:
    """Their blocks choose what they save, so that the plan is another one, and slower."""
    free, compiled = plan_for("17MB"), plan_for("17MB", compile_stages=True)
    assert free.decisions.pointwise_again and not compiled.decisions.pointwise_again
    assert compiled.predicted.step_s > free.predicted.step_s
    refused = [rival for rival in compiled.rivals if "recompute-pointwise" in rival.passes]
    assert any("compile_stages" in rival.reason for rival in refused), refused
