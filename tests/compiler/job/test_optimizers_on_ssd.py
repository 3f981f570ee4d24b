"""Optimizer states on SSD, stepped under the backward pass, before the norm is known or after it: the same bits."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import penstock
from penstock.tests.compiler.eager_baseline import zoo_case
from penstock.tests.runtime.optimizer.every_optimizer import EVERY_OPTIMIZER
from penstock.tests.runtime.ssd.on_disk import directories

PIPELINE = (
    "coarsen, partition-min-stage, map-round-robin, schedule-pipeline, choose-activations, insert-fetch{{swap=true}}, "
    "insert-ssd{{tier={tier}}}, overlap-optimizer{{clip={clip}}}"
)
GROUPS: list[dict[str, Any]] = [{"params": ["*.bias", "*ln_*"], "lr": 0.003}]
SCHEDULE = partial(lr_scheduler.ExponentialLR, gamma=0.7)
STEPS, SAVED_AT = 4, 2
EVERY = ["AdamW-fused", "Adagrad-fused", "SGD-momentum-foreach", "Adafactor-loop", "NAdam-loop", "Rprop-loop"]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return directories(tmp_path)[0]


def enlarge(output: Any, batch: Any) -> Tensor:
    """A loss whose gradients overflow in fp16 until the loss scale has been halved some times."""
    loss: Tensor = output.loss * 8.0
    return loss


def train(
    disk: Path,
    optimizer: Any,
    precision: str,
    norm: float | None,
    clip: str,
    tier: str,
    resume: bool,
    large: bool = False,
) -> tuple[dict[str, Tensor], list[Any]]:
    """Weights, and what was reported of gradients, after STEPS steps, in one run or in two."""
    model, batch = zoo_case("gpt2")
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1GB", dram="2GB", ssd="20GB", ssd_dir=disk)

    def compile_job() -> penstock.Job:
        return penstock.compile(
            copy.deepcopy(model), hardware, example_inputs=batch, optimizer=optimizer, lr_scheduler=SCHEDULE,
            param_groups=GROUPS, strategy=PIPELINE.format(clip=clip, tier=tier), micro_batches=2, precision=precision,
            max_grad_norm=norm, loss_fn=enlarge if large else None,
        )  # fmt: skip

    told: list[Any] = []
    job = compile_job()
    try:
        for step in range(STEPS):
            if resume and step == SAVED_AT:
                job.save(disk / "saved")
                job.close()
                job = compile_job()
                job.resume(disk / "saved")
            job.step(batch)
            assert job.last is not None
            told.append((job.last.gradient_norm, job.last.loss_scale, job.last.skipped))
        return {name: tensor.clone() for name, tensor in job.state_dict().items()}, told
    finally:
        job.close()


def assert_same(left: tuple[dict[str, Tensor], list[Any]], right: tuple[dict[str, Tensor], list[Any]]) -> None:
    assert str(left[1]) == str(right[1])  # NaN and all
    for name, tensor in left[0].items():
        assert torch.equal(right[0][name], tensor), name


@pytest.mark.slow
def test_speculative_and_resumed_is_exact(disk: Path) -> None:
    optimizer = EVERY_OPTIMIZER["AdamW-fused"]
    exact = train(disk, optimizer, "fp32", 0.5, "exact", "all", resume=False)
    assert all(norm > 0.5 for norm, _, _ in exact[1]), "every step is to be done again"
    assert_same(train(disk, optimizer, "fp32", 0.5, "speculative", "states", resume=True), exact)


@pytest.mark.slow
def test_overflow_at_the_first_step_steps_nothing(disk: Path) -> None:
    optimizer = EVERY_OPTIMIZER["AdamW-fused"]
    exact = train(disk, optimizer, "fp16", None, "exact", "all", resume=False, large=True)
    skipped = [row[2] for row in exact[1]]
    assert skipped[0] and not skipped[-1]
    assert_same(train(disk, optimizer, "fp16", None, "speculative", "all", resume=False, large=True), exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "norm"), [("fp32", 0.5), ("fp32", 1e9), ("bf16", 0.5), ("fp16", 0.5), ("fp16", None)]
)
@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_and_precision(name: str, precision: str, norm: float | None, disk: Path) -> None:
    optimizer = EVERY_OPTIMIZER[name]
    exact = train(disk, optimizer, precision, norm, "exact", "all", resume=False)
    assert_same(train(disk, optimizer, precision, norm, "speculative", "all", resume=False), exact)
    assert_same(train(disk, optimizer, precision, norm, "speculative", "states", resume=True), exact)
