"""Members of a team with different tokens and experts of their own, on processes over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock
from penstock.ir import ops
from penstock.tests import zoo
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_steps_like_eager

REORDERED = 5e-6  # the order of additions over tokens and members differs
BEFORE = "drop-masks, split-context{{by={by}, team={team}}}, coarsen, "
PLAIN = "partition-balanced{stages=2}, map-round-robin, schedule-1f1b, insert-remat, insert-fetch, insert-optimizer"
# Devices, members of a team, model, what is divided, and the rest of the pipeline.
LAYOUTS = {
    "rows on 2": (2, 2, "mixtral", "rows", f"mesh, {PLAIN}"),
    "heads on 4": (4, 4, "qwen3_moe", "heads", f"mesh, {PLAIN}"),
    "a ring of 4": (4, 4, "deepseek_v3", "ring", f"mesh, {PLAIN}"),
    "two teams": (4, 2, "deepseek_v3", "rows", f"mesh, {PLAIN}"),
    "2x2 deep": (4, 2, "deepseek_v3", "heads", f"mesh{{depth=2}}, {PLAIN}"),
    "weights in DRAM": (2, 2, "deepseek_v3", "rows", f"mesh, {PLAIN.replace('fetch', 'fetch{swap=true}')}"),
}


def case(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model, and eight rows."""
    model, _ = getattr(zoo, name)(dropout=0.0)
    ids = torch.randint(0, zoo.VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(1))
    return model, {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("layout", LAYOUTS)
def test_routed_experts_on_processes_train_as_eager(layout: str) -> None:
    """The norm has each gradient once."""
    devices, team, name, by, rest = LAYOUTS[layout]
    model, batch = case(name)
    eager = Eager(model, max_grad_norm=0.5)
    line = BEFORE.format(by=by, team=team) + rest
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": 4, "max_grad_norm": 0.5, "strategy": line}
    with penstock.compile(model, penstock.Hardware.cpu(num_devices=devices), example_inputs=batch, **options) as job:
        assert any(node.target is ops.to_experts for program in job.programs for node in program.ops())
        assert_steps_like_eager(job, eager, batch, REORDERED)
