"""The RAM of a process that trains, against what its plan predicts: run as a script, it prints one line of JSON.

A CPU device's memory is also RAM of the process, so the prediction is the sum of the peaks of the device and of DRAM.
The measurement is the growth of the resident set since before the first step. At that time everything is imported and
compiled, the model is on the meta device (its weights come from files), and a tiny job has run, so that code and thread
stacks do not count. Memory that malloc has not returned counts as held.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from functools import partial
from typing import Any

import psutil
import torch

import penstock
from penstock.bench.peers import models

PERIOD_S = 0.005


class Watch:
    """Samples this process's resident set in a thread; `peak_bytes` is the largest sample."""

    def __init__(self) -> None:
        self.process, self.done = psutil.Process(), threading.Event()
        self.start_bytes = self.peak_bytes = self.process.memory_info().rss
        self.thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self.done.wait(PERIOD_S):
            self.peak_bytes = max(self.peak_bytes, self.process.memory_info().rss)

    def __enter__(self) -> Watch:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.done.set()
        self.thread.join()


def compile_job(settings: dict[str, Any], weights: str | None) -> penstock.Job:
    """Compile a job. `settings` has the fields of a `reservoir.Case`, `machine` (a document), `directory` and
    `strategy`."""
    shape = {name: settings[name] for name in ("layers", "width", "tied", "vocabulary")}
    with torch.device("cpu" if weights is None else "meta"):
        model = models.gpt2(**shape)
    return penstock.compile(
        model, penstock.Hardware.model_validate(settings["machine"]), ssd_dirs=[settings["directory"]],
        example_inputs=models.batch(settings["batch"], vocabulary=settings["vocabulary"]),
        optimizer=partial(torch.optim.AdamW, lr=settings["lr"]), strategy=settings["strategy"],
        micro_batches=settings["micro_batches"], weights=weights,
    )  # fmt: skip


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Run `settings["steps"]` steps and return the predicted and measured bytes."""
    torch.set_num_threads(1)
    tiny = {**settings, "layers": 2, "width": 64, "vocabulary": 64}
    with compile_job(tiny, None) as job:
        job.step(models.batch(settings["batch"], vocabulary=64))
    job = compile_job(settings, settings["weights"])
    batch = models.batch(settings["batch"], vocabulary=settings["vocabulary"])
    gc.collect()
    with Watch() as watch, job:
        for _ in range(settings["steps"]):
            job.step(batch)
        accounted = dict(job.last.peak_bytes)
    predicted = {name: peak for name, peak in job.plan.predicted.peak_bytes.items() if not name.startswith("ssd")}
    return {
        "predicted_peak_bytes": predicted, "accounted_peak_bytes": accounted, "rss_before_bytes": watch.start_bytes,
        "rss_peak_bytes": watch.peak_bytes, "rss_growth_bytes": watch.peak_bytes - watch.start_bytes,
        "ratio": (watch.peak_bytes - watch.start_bytes) / sum(predicted.values()),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
