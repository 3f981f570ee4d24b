"""Training on two GPUs under each strategy against eager PyTorch on one; also a script for torchrun.

torchrun --nproc-per-node=2 -m penstock.tests.gpu.two_gpus NAME ...      one line of JSON per name and rank
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import nn

import penstock
from penstock.bench.peers import parity
from penstock.compiler.strategies import STRATEGIES
from penstock.ir import ops
from penstock.ir.program import work_of
from penstock.tests.gpu.rehearsal import DEVICE, batches, model_of
from penstock.tests.graph.divide.mixtures import TOP, WIDTH, LowExperts, LowExpertsApart, Mixture
from penstock.tests.graph.divide.sequences import batches_of
from penstock.tests.passes.running import join_batches

RESIDENT, SWAPPED = "1GB", "1050kB"
# With the memory of each GPU.
SCHEDULES = {
    "gpipe": RESIDENT,
    "1f1b": RESIDENT,
    "interleaved": RESIDENT,
    "zero-bubble": RESIDENT,
    "looped-bfs": RESIDENT,
    "mobius": SWAPPED,
    "mobius-dram": SWAPPED,
    "zero1": RESIDENT,
    "zero2": RESIDENT,
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
}
# What goes to experts on two GPUs by count. CUDA multiplies groups of rows in bf16 alone.
MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "experts": partial(Mixture, dtype=torch.bfloat16),  # each row, as a token of its own
    "experts-once": partial(Mixture, dtype=torch.bfloat16, experts=LowExperts),  # a token once to a GPU; one sum back
    "experts-apart": partial(Mixture, dtype=torch.bfloat16, experts=LowExpertsApart),  # once; results back one by one
    "experts-on-one": partial(Mixture, (0.0, 0.0, 9.0, 8.0), dtype=torch.bfloat16, experts=LowExperts),
}
TEAMS |= dict.fromkeys(MIXTURES, TEAMS["heads"])
# Limits of losses and weights. Results that are summed in bf16 are rounded at other places than eager does; where only
# gradients of tokens and of experts are, some of them become the next number: 1.5e-5 where one did.
LIMITS = {"experts-once": (5e-4, 5e-3), "experts-apart": (1e-6, 1e-4), "experts-on-one": (5e-4, 5e-3)}
# Bytes of the messages to experts and back: of all rows of a GPU's 16 tokens in a micro-batch; of each token once to a
# GPU, where any two of four experts are as likely, so that a token goes to 5/3; and so of the shares of its experts.
_ROWS, _ONCE = 16 * TOP * WIDTH * 2, round(5 / 3 * 16 * WIDTH * 2)
_SHARES = round(5 / 3 * 16 * TOP * 2)
MESSAGES = {
    "experts": {_ROWS},
    "experts-once": {_ONCE, _SHARES},
    "experts-apart": {_ONCE, _ROWS},
    "experts-on-one": {_ONCE, _SHARES},
}
TURNS = {"turns": STRATEGIES["mobius"].replace("take-turns", "take-turns{always=true}")}
ON_SSD = ("fuyou",)
SSD = {"size_bytes": "1GB", "read_bandwidth": "1GB/s", "write_bandwidth": "1GB/s"}


def case(strategy: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """The model that a strategy trains, and batches of four rows."""
    if strategy not in MIXTURES:
        return model_of(), batches()
    torch.manual_seed(3)
    data = [join_batches(batches_of(2, seed)) for seed in range(parity.STEPS)]
    return MIXTURES[strategy](), [{**batch, "labels": batch["ids"]} for batch in data]  # all tokens count


@cache
def eager(precision: str, mixture: str = "") -> parity.Trained:
    return parity.train_eager(*case(mixture), DEVICE, precision, max_grad_norm=1.0)


def messages(job: penstock.Job) -> set[int]:
    """The bytes of each message of tokens to their experts and back, as planned."""
    nodes = [(program, node) for program in job.programs for node in program.ops()]
    return {work_of(p, node).moved_bytes for p, node in nodes if node.target in (ops.to_experts, ops.from_experts)}


def is_within(apart: parity.Parity, strategy: str) -> bool:
    """Whether a strategy in fp32 keeps its limits."""
    loss, weights = LIMITS.get(strategy, parity.LIMITS["fp32"])
    return apart.loss <= loss and apart.weights <= weights


def train(strategy: str, precision: str = "fp32") -> parity.Parity:
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
        assert messages(job) == MESSAGES.get(strategy, set())
        found = parity.train_job(job, data)
    mixture = strategy if strategy in MIXTURES else ""
    return parity.compare(found, eager(precision, mixture), parity.start_of(model))


def main(names: list[str]) -> None:
    parity.exact_arithmetic()
    for name in names:
        apart = train(name)
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        row = {"name": name, "rank": int(os.environ["RANK"]), "within": is_within(apart, name), "retries": retries}
        sys.stdout.write(json.dumps(row | {"found": str(apart)}) + "\n")  # at once: two ranks share the pipe
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
