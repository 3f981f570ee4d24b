"""Training on two GPUs under each strategy against eager PyTorch on one; also a script for torchrun.

torchrun --nproc-per-node=2 -m penstock.tests.gpu.two_gpus NAME ...      one line of JSON per name and rank
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from functools import cache
from typing import Any

import torch
from torch import nn

import penstock
from penstock.bench.peers import parity
from penstock.compiler.strategies import STRATEGIES
from penstock.ir import ops
from penstock.tests.gpu.rehearsal import DEVICE, batches, model_of
from penstock.tests.passes.graph.team.mixtures import Mixture
from penstock.tests.passes.graph.team.sequences import batches_of
from penstock.tests.passes.running import joined

RESIDENT, SWAPPED = "1GB", "1MB"
# With the memory of each GPU.
SCHEDULES = {
    "gpipe": RESIDENT,
    "1f1b": RESIDENT,
    "interleaved": RESIDENT,
    "zero-bubble": RESIDENT,
    "looped-bfs": RESIDENT,
    "mobius": SWAPPED,
    "data-parallel": RESIDENT,
    "zero3-offload": RESIDENT,
    "mics": RESIDENT,
    "fuyou": RESIDENT,
}
_REST = "mesh, partition-balanced, map-round-robin, schedule-1f1b, insert-remat, insert-fetch, insert-optimizer"
TEAMS = {  # ways in which two GPUs share the work inside layers, as pipelines of passes
    "width": f"drop-masks, split-width{{team=2}}, coarsen, {_REST}",
    "heads": f"drop-masks, split-context{{by=heads, team=2}}, coarsen, {_REST}",
    "ring": f"drop-masks, split-context{{by=ring, team=2}}, coarsen, {_REST}",
    "experts": f"drop-masks, split-context{{by=heads, team=2}}, coarsen, {_REST}",  # tokens go to them by count
}
TURNS = {"turns": STRATEGIES["mobius"].replace("take-turns", "take-turns{always=true}")}
ON_SSD = ("fuyou",)
SSD = {"size_bytes": "1GB", "read_bandwidth": "1GB/s", "write_bandwidth": "1GB/s"}


def case(strategy: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """The model that a strategy trains, and batches of four rows."""
    if strategy != "experts":
        return model_of(), batches()
    torch.manual_seed(3)  # CUDA multiplies groups of rows in bf16 alone
    data = [joined(batches_of(2, seed)) for seed in range(parity.STEPS)]
    return Mixture(dtype=torch.bfloat16), [{**batch, "labels": batch["ids"]} for batch in data]  # all tokens count


@cache
def eager(precision: str, is_mixture: bool) -> parity.Trained:
    return parity.train_eager(*case("experts" if is_mixture else ""), DEVICE, precision, max_grad_norm=1.0)


def trained(strategy: str, precision: str = "fp32") -> parity.Parity:
    """Three steps of a job on two GPUs, compared with eager's. The norm is taken over both GPUs."""
    model, data = case(strategy)
    # The size of a disk is what is free there: it may change while ranks compare what they found.
    ssds: Any = [SSD] if strategy in ON_SSD else 0
    memory = SWAPPED if strategy in TURNS else SCHEDULES.get(strategy, RESIDENT)
    hardware = penstock.Hardware.detect().with_(num_devices=2, dram="8GB", ssds=ssds, memory=memory)
    options: dict[str, Any] = {"optimizer": parity.SGD, "micro_batches": parity.MICRO_BATCHES, "max_grad_norm": 1.0}
    options |= {"strategy": {**TEAMS, **TURNS}.get(strategy, strategy), "precision": precision}
    options |= {"ssd_dirs": [tempfile.gettempdir()]} if strategy in ON_SSD else {}
    with penstock.compile(model, hardware, example_inputs=data[0], **options) as job:
        assert job.plan.decisions.fetch or memory != SWAPPED
        assert job.plan.decisions.link_turns or strategy not in TURNS
        routes = any(node.target is ops.to_experts for program in job.programs for node in program.ops())
        assert routes == (strategy == "experts")
        found = parity.train_job(job, data)
    return parity.compare(found, eager(precision, strategy == "experts"), parity.start_of(model))


def main(names: list[str]) -> None:
    parity.exact_arithmetic()
    for name in names:
        apart = trained(name)
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        row = {"name": name, "rank": int(os.environ["RANK"]), "within": apart.within("fp32"), "retries": retries}
        sys.stdout.write(json.dumps(row | {"found": str(apart)}) + "\n")  # at once: two ranks share the pipe
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
