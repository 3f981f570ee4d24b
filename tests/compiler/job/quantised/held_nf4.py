"""Prints the memory that a job holds once its base was quantised while it was read: `held_nf4.py DISK`."""

from __future__ import annotations

import gc
import json
import sys
from functools import partial
from pathlib import Path

import bitsandbytes
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.run import JobRun
from penstock.runtime.device.host import trim_memory
from penstock.runtime.processes.driver import Driver
from penstock.tests.compiler.job.held_memory import held_bytes

WIDTH, LAYERS = 2048, 8  # 128 MiB in fp32, 18 in NF4


class Base(nn.Module):
    def __init__(self, kind: type[nn.Linear] | partial[nn.Linear]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return (self.head(x) - y).square().mean()


def main(disk: str) -> None:
    save_file(Base(nn.Linear).state_dict(), Path(disk, "model.safetensors"))
    kind = partial(bitsandbytes.nn.Linear4bit, quant_type="nf4", compute_dtype=torch.float32)
    with torch.device("meta"):
        model = Base(kind).train().requires_grad_(False)
    model.head.requires_grad_(True)
    batch = {"x": torch.randn(4, WIDTH), "y": torch.randn(4, 8)}
    machine = penstock.Hardware.cpu(1, memory="300MB", dram="600MB")
    job = penstock.compile(model, machine, example_inputs=batch, weights=disk, micro_batches=2, search_s=1)
    gc.collect()
    trim_memory()
    started, start = list[int](), JobRun._start

    def noting(run: JobRun) -> Driver:
        driver = start(run)
        started.append(held_bytes())
        return driver

    JobRun._start = noting  # type: ignore[method-assign]
    with job:
        weights = sum(job.folder.interface.stages[stage].weight_bytes for stage in job.driver.setup.stage_devices)
        print(json.dumps({"weights": weights, "resting": held_bytes() - started[0]}))


if __name__ == "__main__":
    main(sys.argv[1])
