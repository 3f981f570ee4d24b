"""Penstock's jobs on the ranks of two hosts; run by torchrun, see `ranks`. One job per plan, all in the same processes.

`settings["plans"]` maps names to files of plans; `settings["hardware"]` is the document that they were made for. The
script that starts the ranks makes the plans, with the same function `compile_job`.
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
from penstock.bench.peers.timing import whole_step


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    batch = models.batch(settings["batch"], vocabulary=settings["vocabulary"])
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(compile_job(settings, plan=path)) for name, path in settings["plans"].items()}
        serve({name: partial(whole_step, job, batch) for name, job in jobs.items()}, settings["socket"])


def compile_job(settings: Mapping[str, Any], **how: Any) -> penstock.Job:
    """A job for the model of the settings. `how` has its strategy or its plan."""
    model = models.gpt2(settings["layers"], settings["width"], settings["tied"], settings["vocabulary"])
    return penstock.compile(
        model.train(), settings["hardware"],
        example_inputs=models.batch(settings["batch"], vocabulary=settings["vocabulary"]),
        optimizer=partial(torch.optim.AdamW, lr=settings["lr"]), micro_batches=settings["micro_batches"], **how,
    )  # fmt: skip


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
