"""Prints the most memory that a job's processes hold, in phases, beside the plan's: `held_memory.py DEVICES DISK`."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
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

WIDTH, LAYERS = 768, 24  # 57 MB in fp32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return (x - y).square().mean()


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


def main(num_devices: int, disk: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=disk))
    weights = Net().state_dict()
    num_bytes = sum(weight.nbytes for weight in weights.values())
    save_file(weights, folder / "model.safetensors")
    del weights
    with torch.device("meta"):
        model = Net().train()
    batch = {name: torch.randn(8, WIDTH) for name in "xy"}
    options: dict[str, Any] = {"strategy": on_ssd(), "ssd_dirs": [folder]} if num_devices == 0 else {}
    memory = "100MB" if num_devices == 0 else "400MB"
    machine = penstock.Hardware.cpu(max(1, num_devices), memory=memory, dram="200MB", ssd="1GB")
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
        "background": lambda: num_devices == 0 and job.save(folder / "saved", wait=False).wait(),
        "resume": lambda: job.resume(folder / "saved"),
        "more steps": lambda: [job.step(batch) for _ in range(3)],
    }
    with job:
        loaded = most_bytes(phases.pop("load"))
        resting = held_bytes()
        found = {"load": loaded, **{name: most_bytes(act) for name, act in phases.items()}}
    planned = sum(num for memory, num in predicted.peak_bytes.items() if not memory.startswith("ssd"))
    held = {name: most - started[0] for name, most in found.items()}
    print(json.dumps({"planned": planned, "weights": num_bytes, "resting": resting - started[0], "held": held}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
