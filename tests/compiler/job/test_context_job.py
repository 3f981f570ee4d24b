"""Members of a team on processes of their own, over gloo: losses, states, outputs and messages."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.tests.compiler.eager_baseline import SGD, Eager, assert_steps_like_eager, zoo_case

REORDERED = 5e-6  # the order of additions over tokens and members differs
BEFORE = "drop-masks, chunk-loss, interleave-forwards, split-context{{by={by}, team={team}}}, coarsen, "
PLAIN = "partition-balanced{stages=1}, map-round-robin, schedule-1f1b, insert-remat, insert-fetch, insert-optimizer"
SHARED = (
    "partition-min-stage, map-round-robin, schedule-1f1b, insert-remat{always=true}, insert-shard{tier=dram}, "
    "insert-two-hop, insert-optimizer"
)
# Devices, members of a team, model, how they meet, and the rest of the pipeline.
LAYOUTS = {
    "2": (2, 2, "gpt2", "heads", f"mesh, {PLAIN}"),
    "4": (4, 4, "llama", "heads", f"mesh, {PLAIN}"),
    "2x2 shards": (4, 2, "mistral", "heads", f"mesh{{shards=4}}, {SHARED}"),
    "ring of 2": (2, 2, "gpt2", "ring", f"mesh, {PLAIN}"),
    "ring of 4": (4, 4, "opt", "ring", f"mesh, {PLAIN}"),
    "ring of windows": (4, 4, "mistral", "ring", f"mesh, {PLAIN}"),
    "rings with shards": (4, 2, "llama", "ring", f"mesh{{shards=4}}, {SHARED}"),
    "2x2 deep": (4, 2, "qwen3", "heads", f"mesh{{depth=2}}, {PLAIN.replace('stages=1', 'stages=2')}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_team_on_processes_trains_as_eager(layout: str) -> None:
    devices, team, name, by, rest = LAYOUTS[layout]
    model, batch = zoo_case(name)
    eager = Eager(model, max_grad_norm=0.5)
    line = BEFORE.format(by=by, team=team) + rest
    options: dict[str, Any] = {"optimizer": SGD, "micro_batches": 2, "max_grad_norm": 0.5, "strategy": line}
    with penstock.compile(model, penstock.Hardware.cpu(num_devices=devices), example_inputs=batch, **options) as job:
        assert_steps_like_eager(job, eager, batch, REORDERED)
