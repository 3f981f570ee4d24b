"""The search cuts sequences into tiles where memory is short, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.compiler.strategies import PIPELINE
from penstock.ir.errors import DoesNotFit, PassError
from penstock.ir.machine.hardware import Hardware

BATCH = {name: torch.empty(1, 16384, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")}


def plan_for(memory: str, **options: Any) -> penstock.Plan:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=2, hidden_size=64, intermediate_size=2048, num_attention_heads=4, vocab_size=64
            )
        )
    machine = Hardware.cpu(num_devices=1, memory=memory)
    return penstock.compile(model, machine, example_inputs=BATCH, **options).plan


@pytest.mark.slow
def test_a_layer_that_fits_no_device_is_cut() -> None:
    with pytest.raises(DoesNotFit):
        plan_for("250MB", strategy="drop-masks, chunk-loss, " + PIPELINE)
    plan = plan_for("250MB")
    assert len(plan.decisions.tiles) == 4 and all(1024 <= n <= 8192 for n in plan.decisions.tiles.values())
    assert plan.predicted.peak_bytes["cpu0"] <= 250e6
    assert not any("tile-sequence" not in rival.passes and rival.step_s for rival in plan.rivals)


@pytest.mark.slow
def test_a_device_with_room_has_no_tiles() -> None:
    plan = plan_for("8GB")
    assert not plan.decisions.tiles
    assert not any("tile-sequence" in rival.passes for rival in plan.rivals)


@pytest.mark.slow
def test_tiles_pay_where_all_else_would_be_computed_again() -> None:
    """A stage whose parts are cut keeps what attention needs; without tiles it keeps too much, and attends twice."""
    plan = plan_for("1000MB")
    assert plan.decisions.tiles
    others = [rival.step_s for rival in plan.rivals if rival.step_s and "tile-sequence" not in rival.passes]
    assert others and plan.predicted.step_s < min(others)


def test_passes_that_would_change_parts_come_before_them() -> None:
    with pytest.raises(PassError, match="'chunk-loss' comes after 'tile-sequence', whose work it would change"):
        plan_for("250MB", strategy="tile-sequence, chunk-loss, " + PIPELINE)
