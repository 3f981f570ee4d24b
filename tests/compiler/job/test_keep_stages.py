"""Jobs of which some stages stay whole on a device that fetches the others: everything as in DRAM, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.compiler.job.job import Job
from penstock.ir import ops
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, zoo_case
from penstock.tests.compiler.job.ssd_jobs import ADAM, assert_same, train_steps

HEAD = "drop-masks, chunk-loss, coarsen, partition-balanced{stages=6}, map-round-robin, schedule-pipeline"
TAILS = {
    "dram": "insert-remat, insert-fetch, insert-optimizer",
    "overlap": "choose-activations, insert-fetch, overlap-optimizer",
    "ssd": "choose-activations{tier=states}, insert-fetch, insert-ssd{tier=states}, overlap-optimizer",
    "weights-on-ssd": "choose-activations{tier=all}, insert-fetch, insert-ssd{tier=all}, overlap-optimizer",
}
MEMORY = {1: "600kB", 2: "330kB"}


def train(tail: str, kept: str, disk: Path, num_devices: int = 1, **options: Any) -> tuple[Job, Any]:
    model, batch = zoo_case("gpt2", dropout=0.1)
    machine = penstock.Hardware.cpu(num_devices, memory=MEMORY[num_devices], dram="200MB", ssd="2GB")
    job = penstock.compile(
        model, machine, example_inputs=batch, strategy=f"{HEAD}, {kept}{TAILS[tail]}", optimizer=ADAM,
        micro_batches=MICRO_BATCHES, ssd_dirs=[disk] if "ssd" in tail else None, **options,
    )  # fmt: skip
    with job:
        return job, train_steps(job, batch)


CLIPPED = {"max_grad_norm": 0.5}
CASES = [
    (tail, devices, options)
    for tail in TAILS
    for devices in MEMORY
    for options in ({}, CLIPPED, {"precision": "bf16", **CLIPPED}, {"precision": "fp16"})
]


@pytest.mark.slow
@pytest.mark.parametrize(("tail", "devices", "options"), CASES)
def test_equals_the_job_that_fetches_all(tail: str, devices: int, options: dict[str, Any], tmp_path: Path) -> None:
    job, found = train(tail, "keep-stages{share=0.6}, ", tmp_path, devices, **options)
    resident, fetched = set(job.plan.decisions.resident), set(job.plan.decisions.fetch)
    assert resident and fetched and not resident & fetched
    assert {job.plan.decisions.optimizer[stage] for stage in resident} == {ops.DEVICE}
    assert_same(found, train(tail, "", tmp_path, devices, **options)[1])
