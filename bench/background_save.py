"""The pause of training for a checkpoint: `job.save(wait=True)` against `job.save(wait=False)`, of one job.

Steps are made one after another, with a save every 12 steps, of both kinds in turns, or none. The longest time from
step to step with a save in it, less the usual one without, is the stall. Of that, `save` itself blocks; the rest is
what a step loses to the threads that write beside it, as they share its cores. The first save in the background
takes the memory of its copy, too, so it is listed apart. The checkpoints are flushed to the disk, as always.

Run: python bench/background_save.py [--saves N] [--layers N] [--directory DIR]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.compiler.job.job import Job

STEPS = 12  # from save to save
ROWS, SEQUENCE, VOCABULARY = 2, 64, 4096
KINDS = {"plain": None, "wait": True, "behind": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=5, help="of each kind")
    parser.add_argument("--layers", type=int, default=6, help="of a GPT-2")
    parser.add_argument("--width", type=int, default=512, help="of a GPT-2")
    parser.add_argument("--directory", help="where checkpoints go; default: a temporary one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = {name: value[:ROWS, :SEQUENCE].contiguous() for name, value in models.batch(vocabulary=VOCABULARY).items()}
    model = models.gpt2(layers=args.layers, width=args.width, tied=False, vocabulary=VOCABULARY)
    job = penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1, memory="6GB", dram="8GB"), example_inputs=batch,
        optimizer=partial(torch.optim.AdamW, lr=1e-4), strategy="gpipe", micro_batches=1,
    )  # fmt: skip
    with job, tempfile.TemporaryDirectory(dir=args.directory) as folder:
        for _ in range(STEPS):
            job.step(batch)
        found = [time_save(job, batch, Path(folder), False)]  # it takes the memory of the copy
        parts: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for _ in range(args.saves):
            for kind, wait in KINDS.items():
                parts[kind].append(time_save(job, batch, Path(folder), wait))
        size_bytes = sum(path.stat().st_size for path in (Path(folder) / "c").iterdir())
    step_s = statistics.median(part["median_s"] for part in parts["plain"])
    heads = ("longest stall", "median stall", "in save itself", "step", "written after")
    print(f"{'save':8}{''.join(f'{head:>16}' for head in heads)}")
    for kind, all_parts in {"first": found, **parts}.items():
        stalls = [part["longest_s"] - step_s for part in all_parts]
        row = {
            "save": kind,
            "longest_stall_s": max(stalls),
            "median_stall_s": statistics.median(stalls),
            "in_save_s": statistics.median(part["in_save_s"] for part in all_parts),
            "step_s": statistics.median(part["median_s"] for part in all_parts),
            "mean_step_s": statistics.mean(part["mean_s"] for part in all_parts),
            "written_after_s": statistics.median(part["written_s"] for part in all_parts),
        }
        figures = (row[key] for key in ("longest_stall_s", "median_stall_s", "in_save_s", "step_s", "written_after_s"))
        print(f"{kind:8}{''.join(f'{1e3 * figure:13.0f} ms' for figure in figures)}")
        rows.save("background_save", {**row, "checkpoint_bytes": size_bytes, "saves": len(all_parts), "steps": STEPS})


def time_save(job: Job, batch: Any, folder: Path, wait: bool | None) -> dict[str, float]:
    """Time a save, or none: the times from step to step. It ends when the checkpoint is there."""
    _ = job.last
    times_s, began_s = list[float](), time.perf_counter()
    save = None
    if wait is not None:
        save = job.save(folder / "c") if wait else job.save(folder / "c", wait=False)
    saved_s = in_save_s = time.perf_counter() - began_s
    before_s, is_there = began_s, False
    for _ in range(STEPS):
        job.step(batch)
        now_s = time.perf_counter()
        times_s.append(now_s - before_s)
        before_s = now_s
        if isinstance(save, penstock.BackgroundSave) and not is_there:
            saved_s, is_there = now_s - began_s, save.done  # as far as a step shows
    if isinstance(save, penstock.BackgroundSave):
        save.wait()
    return {
        "longest_s": max(times_s),
        "in_save_s": in_save_s if wait is not None else 0.0,
        "median_s": statistics.median(times_s),
        "mean_s": statistics.mean(times_s),
        "written_s": saved_s if wait is not None else 0.0,
    }


if __name__ == "__main__":
    main()
