"""How updates go over memory: what is said of them, and what their tiles take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from penstock.ir import ops
from penstock.ir.program import Interface, ParamSpec, StageSpec, interface
from penstock.runtime.optimizer import tiles
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec, StageOptimizer, Workspace
from penstock.runtime.optimizer.ways import steps_in_tiles, way_on_host
from penstock.runtime.stage.shards import rounding_of


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


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("most", [512, 1 << 24])
def test_tiles_take_what_is_charged_at_most(rounds: bool, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILED_ELEMENTS", most)
    monkeypatch.setattr(interface, "TILED_ELEMENTS", most)
    shapes = {"a": (40, 50), "b": (30,)}
    params = tuple(ParamSpec(name, shape, "bfloat16") for name, shape in shapes.items())
    stage = StageSpec("stage0", (), (), params)
    plan = Interface({"stage0": stage}, {}, master=not rounds, rounds=rounds, tiles=True)
    charged_bytes = plan.update_bytes(stage, ops.DRAM, converted=True)
    assert charged_bytes == 4 * (1 + rounds) * min(most, 2030) <= plan.update_bytes(stage, ops.DEVICE, converted=True)
    dtype, workspace = torch.bfloat16 if rounds else torch.float32, Workspace(torch.device("cpu"))
    masters = {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items()}
    spec, rounding = OptimizerSpec.from_callable(torch.optim.AdamW), rounding_of(stage, {}) if rounds else None
    part = StageOptimizer(spec, masters, workspace=workspace, rounding=rounding)
    part.step({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    assert 0 < workspace.bytes <= charged_bytes
