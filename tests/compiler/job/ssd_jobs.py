"""Jobs with and without SSD on the same stages and seeds, and all of their results, to compare bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, optimizer_states, zoo_case

ADAM = partial(torch.optim.AdamW, lr=1e-2)
STAGES = (
    "drop-masks, chunk-loss, interleave-forwards, coarsen, partition-min-stage{inputs_leave=true}, map-round-robin, "
    "schedule-pipeline"
)
CROSSED = "coarsen, partition-balanced{stages=4}, map-cross, schedule-pipeline"
DRAM_TAIL = "insert-remat, insert-fetch{swap=true}, insert-optimizer"


def in_dram(stages: str = STAGES) -> str:
    """A strategy without SSD: weights, masters and states lie in DRAM."""
    return f"{stages}, {DRAM_TAIL}"


def on_ssd(
    tier: str = "all", clip: str = "auto", overlap: bool = True, activations: str = "", stages: str = STAGES
) -> str:
    """The same stages on SSD; with the default arguments it is the strategy "fuyou"."""
    chosen = ", ".join(filter(None, ("swap=true", f"tier={tier}", activations)))
    return (
        f"{stages}, choose-activations{{{chosen}}}, insert-fetch{{swap=true}}, insert-ssd{{tier={tier}}}, "
        f"overlap-optimizer{{clip={clip}, overlap={str(overlap).lower()}}}"
    )


def job_of(
    name: str,
    strategy: str,
    disks: Sequence[Path] = (),
    *,
    num_devices: int = 1,
    dram: str | int = "200MB",
    prepare: Callable[[nn.Module], None] | None = None,
    **options: Any,
) -> tuple[Job, dict[str, Tensor]]:
    """A compiled job on a model of the zoo, with dropout, and its batch; on disks with checksums."""
    model, batch = zoo_case(name, dropout=0.1)
    if prepare is not None:
        prepare(model)
    machine = penstock.Hardware.cpu(num_devices, memory="64MB", dram=dram, ssd="2GB")
    chosen = {"optimizer": ADAM, "micro_batches": MICRO_BATCHES, "ssd_verify": bool(disks), **options}
    job = penstock.compile(
        model, machine, example_inputs=batch, strategy=strategy, ssd_dirs=list(disks) or None, **chosen
    )
    return job, batch


Trained = tuple[list[Any], dict[Any, Tensor]]


def train_steps(job: Job, batch: Any, steps: int = 3) -> Trained:
    """Each step's loss and what was reported of gradients; then weights, buffers, states, and the loss in evaluation.
    The job stays open."""
    told = []
    for _ in range(steps):
        loss = float(job.step(batch))
        assert job.last is not None
        told.append((loss, job.last.gradient_norm, job.last.loss_scale, job.last.skipped))
    return told, left_by(job, batch)


def left_by(job: Job, batch: Any) -> dict[Any, Tensor]:
    rows = {(*where, key): state for where, row in optimizer_states(job).items() for key, state in row.items()}
    found = {**rows, **job.state_dict(), "evaluation": job.evaluate(batch).loss}
    return {name: tensor.clone() for name, tensor in found.items()}


@cache
def trained_in_dram(name: str, strategy: str = in_dram(), **options: Any) -> Trained:
    """The results of the same job without SSD; each job is trained once."""
    job, batch = job_of(name, strategy, **options)
    with job:
        return train_steps(job, batch)


def assert_same(found: Trained, wanted: Trained) -> None:
    assert str(found[0]) == str(wanted[0])  # every digit, NaN as well
    assert set(found[1]) == set(wanted[1])
    for name, want in wanted[1].items():
        assert torch.equal(found[1][name].nan_to_num(), want.nan_to_num()), name
        assert torch.equal(found[1][name].isnan(), want.isnan()), name


def partly_frozen(model: nn.Module) -> None:
    """Freeze a whole block, and single parameters of others."""
    blocks = model.get_submodule("transformer.h")
    for parameter in (
        *blocks.get_submodule("0").parameters(),
        blocks.get_parameter("1.attn.c_attn.weight"),
        model.get_parameter("transformer.ln_f.weight"),
    ):
        parameter.requires_grad_(False)
