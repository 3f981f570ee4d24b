"""Prints the most memory that a job's processes hold, in phases, beside the plan's: `held_memory.py CASE DISK`."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import penstock
from penstock.compiler.job.run import JobRun
from penstock.runtime.device.host import trim_memory
from penstock.runtime.processes.driver import Driver
from penstock.tests.compiler.job.ssd_jobs import on_ssd


class Net(nn.Module):
    def __init__(self, width: int, layers: int, kind: Callable[[int, int], nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return (x * self.scale - y).square().mean()


@dataclass(frozen=True)
class Case:
    """`width`, `layers`: of the net; `memory`: of a device. Layers are quantised while they are read (`is_nf4`), or
    trained, with their states on an SSD (`on_disk`)."""

    devices: int
    width: int = 768
    layers: int = 24  # 57 MB in fp32
    memory: str = "400MB"
    is_nf4: bool = False
    on_disk: bool = False

    def model(self) -> nn.Module:
        if not self.is_nf4:
            return Net(self.width, self.layers).train()
        import bitsandbytes

        kind = partial(bitsandbytes.nn.Linear4bit, quant_type="nf4", compute_dtype=torch.float32)
        model = Net(self.width, self.layers, kind).train().requires_grad_(False)
        model.scale.requires_grad_(True)
        return model


CASES = {
    "one on SSD": Case(1, memory="100MB", on_disk=True),
    "one": Case(1),
    "two": Case(2),
    "NF4, one": Case(1, width=2048, layers=8, is_nf4=True),  # 128 MiB in fp32, 18 in NF4, and 16 for a layer at work
    "NF4, two": Case(2, width=2048, layers=8, is_nf4=True),
}


def held_bytes() -> int:
    """The memory of this process and its children that is no file's, pages that they share counted once."""
    own, found = psutil.Process(), 0
    for process in (own, *own.children(recursive=True)):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        found += sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return found


def most_bytes(act: Callable[[], Any]) -> int:
    over, found = threading.Event(), [0]

    def look() -> None:
        while not over.is_set():
            found[0] = max(found[0], held_bytes())
            time.sleep(0.002)

    watch = threading.Thread(target=look)
    watch.start()
    act()
    over.set()
    watch.join()
    return found[0]


def main(name: str, disk: str) -> None:
    case, folder = CASES[name], Path(tempfile.mkdtemp(dir=disk))
    save_file(Net(case.width, case.layers).state_dict(), folder / "model.safetensors")
    with torch.device("meta"):
        model = case.model()
    batch = {name: torch.randn(8, case.width) for name in "xy"}
    options: dict[str, Any] = {"strategy": on_ssd(), "ssd_dirs": [folder]} if case.on_disk else {}
    machine = penstock.Hardware.cpu(case.devices, memory=case.memory, dram="200MB", ssd="1GB")
    job = penstock.compile(
        model, machine, example_inputs=batch, weights=folder, micro_batches=2, search_s=1,
        optimizer=partial(torch.optim.AdamW, lr=1e-3), **options,
    )  # fmt: skip
    gc.collect()
    trim_memory()
    predicted, started, start = job.plan.predicted, list[int](), JobRun._start
    assert predicted is not None

    def noting(run: JobRun) -> Driver:
        driver = start(run)
        started.append(held_bytes())
        return driver

    JobRun._start = noting  # type: ignore[method-assign]
    phases: dict[str, Callable[[], Any]] = {
        "load": lambda: job.driver,
        "steps": lambda: [job.step(batch) for _ in range(3)],
        "save": lambda: job.save(folder / "saved"),
        "background": lambda: case.on_disk and job.save(folder / "saved", wait=False).wait(),
        "resume": lambda: job.resume(folder / "saved"),
        "more steps": lambda: [job.step(batch) for _ in range(3)],
    }
    with job:
        loaded = most_bytes(phases.pop("load"))
        resting = held_bytes()
        found = {"load": loaded, **{name: most_bytes(act) for name, act in phases.items()}}
    weights = 0 if case.on_disk else sum(spec.weight_bytes for spec in job.folder.interface.stages.values())
    planned = sum(num for memory, num in predicted.peak_bytes.items() if not memory.startswith("ssd"))
    held = {name: most - started[0] for name, most in found.items()}
    print(json.dumps({"planned": planned, "weights": weights, "resting": resting - started[0], "held": held}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
