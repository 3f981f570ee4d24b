"""A GPT on two devices with compiled stages against eager PyTorch on one; also a script for torchrun.

torchrun --nproc-per-node=2 -m penstock.tests.compiler.job.compiled_devices BACKEND      one line of JSON per rank
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch
from torch._dynamo.utils import counters

import penstock
from penstock.bench.peers import parity
from penstock.runtime.device import state
from penstock.runtime.processes.local import worker_environment
from penstock.tests.gpu.rehearsal import batches, model_of


def train(strategy: str = "1f1b") -> tuple[parity.Parity, list[float], dict[str, Any]]:
    """Three steps of a job: how far they are from eager's, their losses, and the blocks that ran eagerly, as all would
    that a step had to compile."""
    model, data = model_of(), batches()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = parity.train_eager(model, data, device, "fp32")
    hardware = penstock.Hardware.cpu(num_devices=2, memory="1GB", dram="2GB")
    if device == "cuda":
        hardware = penstock.Hardware.detect().with_(num_devices=2, dram="8GB", ssds=0, memory="1GB")
    options: dict[str, Any] = {"optimizer": parity.SGD, "micro_batches": parity.MICRO_BATCHES, "strategy": strategy}
    with penstock.compile(model, hardware, example_inputs=data[0], compile_stages=True, **options) as job:
        found = parity.train_job(job, data)
        eager_blocks = job.last.eager_blocks
    return parity.compare(found, wanted, parity.start_of(model)), found.losses, eager_blocks


def ranks(backend: str) -> list[dict[str, Any]]:
    """The output of two ranks of torchrun: whether they are within the tolerance, and what torch counted."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", __name__, backend]
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main(backend: str) -> None:
    parity.exact_arithmetic()
    state.BACKEND = backend
    apart, losses, eager_blocks = train()
    row = {"within": apart.fits("fp32"), "found": str(apart), "losses": losses, "eager_blocks": eager_blocks}
    row |= {name: dict(counters[name]) for name in ("stats", "aot_autograd")}
    sys.stdout.write(json.dumps({"rank": int(os.environ["RANK"]), **row}) + "\n")  # at once: two ranks share the pipe
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
