"""Parameter groups, frozen parameters and a schedule for each group through a whole job: eager PyTorch, bit for bit."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import penstock
from penstock.errors import PlanError
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.shown_elsewhere import slow_but

MICRO_BATCHES = 4
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
GROUPS: list[dict[str, Any]] = [
    {"params": ["*.bias", "*ln_*"], "weight_decay": 0.0},
    {"params": ["*wpe*"], "lr": 0.1},
]


def halving(step: int) -> float:
    return 0.5**step


def constant(step: int) -> float:
    return 1.0


SCHEDULE = partial(lr_scheduler.LambdaLR, lr_lambda=[constant, halving, halving])


def in_group(name: str) -> int:
    return 0 if name.endswith(".bias") or "ln_" in name else 1 if "wpe" in name else 2


def train_eagerly(model: nn.Module, batch: dict[str, Tensor], steps: int) -> dict[str, Tensor]:
    model = copy.deepcopy(model).train()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: list[dict[str, Any]] = [{"params": []} for _ in range(3)]
    for name, param in params.items():
        rows[in_group(name)]["params"].append(param)
    rows[0]["weight_decay"], rows[1]["lr"] = 0.0, 0.1
    optimizer = torch.optim.AdamW(rows, lr=1e-2, weight_decay=0.1, fused=True)
    scheduler = SCHEDULE(optimizer)
    for _ in range(steps):
        for m in range(MICRO_BATCHES):
            loss = model(**{key: t.chunk(MICRO_BATCHES)[m] for key, t in batch.items()})["loss"]
            loss.backward(torch.full_like(loss, 1 / MICRO_BATCHES))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


@pytest.mark.parametrize("strategy", slow_but(("mobius",), ["gpipe", "mobius"]))
def test_a_job_with_groups_trains_like_eager_also_behind_a_resume(strategy: str, tmp_path: Path) -> None:
    model, batch = zoo_case("gpt2")
    model.transformer.h[0].mlp.c_fc.weight.requires_grad_(False)
    want = train_eagerly(model, batch, steps=4)
    arguments: dict[str, Any] = {
        "example_inputs": batch,
        "optimizer": ADAMW,
        "lr_scheduler": SCHEDULE,
        "param_groups": GROUPS,
        "strategy": strategy,
        "micro_batches": MICRO_BATCHES,
    }
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1GB", dram="2GB")
    with penstock.compile(copy.deepcopy(model), hardware, **arguments) as job:
        for _ in range(2):
            job.step(batch)
        job.save(tmp_path / "saved")
    with penstock.compile(copy.deepcopy(model), hardware, **arguments) as job:
        job.resume(tmp_path / "saved")
        for _ in range(2):
            job.step(batch)
        found = job.state_dict()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


def test_groups_that_cannot_be_are_refused_before_planning() -> None:
    model, batch = zoo_case("gpt2")
    for groups, says in [
        ([{"params": ["*.biass"]}], "matches no parameter; near are .*bias"),
        ([{"params": [nn.Parameter(torch.zeros(2))]}], "no parameter of the model"),
        ([{"params": ["*.bias"], "learning_rate": 1}], "no option 'learning_rate'"),
    ]:
        with pytest.raises(PlanError, match=says):
            penstock.compile(model, penstock.Hardware.cpu(), example_inputs=batch, param_groups=groups)
    with pytest.raises(PlanError, match=r"Muon does not work for transformer.h.0.ln_1.weight, of shape \[32\]"):
        penstock.compile(model, penstock.Hardware.cpu(), example_inputs=batch, optimizer=torch.optim.Muon)
