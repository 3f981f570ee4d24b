"""Updates in words: what is said is what steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from penstock.compiler.report.updates import way_on_host
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer
from penstock.runtime.optimizer.tiles import steps_in_tiles


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (torch.optim.AdamW, "AdamW in one pass over memory, in tiles where anything is converted"),
        (partial(torch.optim.Adam, foreach=True), "Adam by torch as it is, as its options choose no fused kernel"),
        (torch.optim.RAdam, "RAdam by torch as it is, as only Adam, AdamW, SGD, Adagrad can be divided"),
    ],
)
def test_what_is_said_is_what_steps(optimizer: Any, said: str) -> None:
    spec = OptimizerSpec.from_callable(optimizer)
    assert way_on_host(spec) == said
    part = StageOptimizer(spec, {"weight": torch.ones(4, 4)})
    assert steps_in_tiles(spec) == part._is_tiled("weight", torch.ones(4, 4, dtype=torch.bfloat16))
