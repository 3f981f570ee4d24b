"""Penstock's jobs on the ranks of two hosts; run by torchrun, see `ranks`. One job per plan, all in the same processes.

`settings["plans"]`: name to strategy; `settings["hardware"]`: a document.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import penstock
from penstock.bench.peers import models
from penstock.bench.peers.ranks import serve


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    batch = models.batch(settings["batch"], vocabulary=settings["vocabulary"])
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(compiled(settings, strategy)) for name, strategy in settings["plans"].items()}
        sides = {name: partial(step, job, batch) for name, job in jobs.items()}
        serve(sides, settings["socket"], {"plans": {name: facts(job) for name, job in jobs.items()}})


def compiled(settings: Mapping[str, Any], strategy: str) -> penstock.Job:
    """The job of a strategy for the model of the settings."""
    model = models.gpt2(settings["layers"], settings["width"], vocabulary=settings["vocabulary"])
    return penstock.compile(
        model.train(), settings["hardware"],
        example_inputs=models.batch(settings["batch"], vocabulary=settings["vocabulary"]),
        optimizer=partial(torch.optim.AdamW, lr=settings["lr"]), strategy=strategy,
        micro_batches=settings["micro_batches"],
    )  # fmt: skip


def facts(job: penstock.Job) -> dict[str, Any]:
    return {
        "passes": job.plan.passes, "stages": len(job.plan.decisions.stages), "predicted_s": job.plan.predicted.step_s
    }  # fmt: skip


def step(job: penstock.Job, batch: dict[str, torch.Tensor]) -> float:
    return float(job.step(batch))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
