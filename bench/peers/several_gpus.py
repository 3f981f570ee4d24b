"""All GPUs of a host together: plans of Penstock beside FSDP2 and torch.distributed.pipelining (`several_ranks`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

import penstock
from penstock.bench.peers.gpt import SMALL, XL
from penstock.bench.peers.gpu_setup import Row, Setup, note_call, row_at_most
from penstock.bench.peers.several_ranks import FSDP, PIPELINE
from penstock.runtime.processes.local import worker_environment

MOST_GPUS = 8
LOSS_LIMIT = 1e-4  # relative, between sides that compute in fp32
# Strategies by the names of their rows. Plans of SWAPPED get less memory than the card has, so that weights travel.
RESIDENT = {"auto": "auto", "1f1b": "1f1b", "mixed-pipe": "ftpipe", "zero1": "zero1", "mics": "mics"}
SWAPPED = {"mobius": "mobius", "zero3-offload": "zero3-offload"}


def several(setup: Setup) -> Iterator[Row]:
    """A row for each side: seconds of a step, the loss, GiB that torch reserved on each GPU; then the fastest of ours
    over the fastest of theirs."""
    world = number_of_gpus(setup)
    if world < 2:
        yield note_call("steps on several GPUs", "this machine has one at most")
        return
    size = replace(SMALL if setup.small else XL, tied=False, layers=max(world, (SMALL if setup.small else XL).layers))
    hardware = setup.scratch / "several.yaml"
    hardware_of(setup, world).save(hardware)
    held = {"memory": "1050kB" if setup.small else "12GB"}
    plans = {name: {"strategy": strategy, "hardware": {}} for name, strategy in RESIDENT.items()}
    plans |= {name: {"strategy": strategy, "hardware": held} for name, strategy in SWAPPED.items()}
    settings = {
        "size": asdict(size), "small": setup.small, "lr": 1e-4, "micro_batches": 2 * world, "plans": plans,
        "rows": 2 * world * (1 if setup.small else 2), "hardware": str(hardware),
    }  # fmt: skip
    sides: dict[str, list[Row]] = defaultdict(list)
    for row in rows_of_ranks("several_ranks", settings, world):
        own = sides[row["side"]]
        own.append(row)
        if len(own) == world:
            yield summary(own, world)
    yield from comparison(sides, setup.small)


def number_of_gpus(setup: Setup) -> int:
    """The GPUs that take part, none on a CPU."""
    return min(MOST_GPUS, torch.cuda.device_count()) if setup.on_gpu else 0


def hardware_of(setup: Setup, world: int) -> penstock.Hardware:
    """These GPUs with their host, as measured if the first call has done so."""
    measured = setup.scratch / "hardware.yaml"
    found = penstock.Hardware.load(measured) if measured.exists() else penstock.Hardware.detect()
    return found.with_(num_devices=world, ssds=0)


def rows_of_ranks(module: str, settings: dict[str, Any], world: int) -> Iterator[Row]:
    """The lines of all ranks of a module of this folder, as they come. Raises `CalledProcessError` if they end
    badly."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += ["-m", f"penstock.bench.peers.{module}", json.dumps(settings)]
    environment = worker_environment(max(1, len(os.sched_getaffinity(0)) // world))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        yield from (json.loads(line) for line in child.stdout if line.startswith("{"))
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, "torchrun")


def summary(ranks: list[Row], world: int) -> Row:
    side = ranks[0]["side"]
    refused = [row["refused"] for row in ranks if "refused" in row]
    if refused:
        return note_call(f"a side on {world} GPUs is refused", refused[0], side=side)
    return note_call(
        f"seconds of a step on {world} GPUs", max(row["step_s"] for row in ranks), side=side,
        loss=next(row["loss"] for row in ranks if row["loss"] is not None),
        reserved_gib=[row["reserved_gib"] for row in sorted(ranks, key=lambda row: row["rank"])],
    )  # fmt: skip


def comparison(sides: dict[str, list[Row]], small: bool) -> Iterator[Row]:
    """The fastest plan over the fastest peer; of small models also how far the losses of all sides are apart."""
    done = {name: rows for name, rows in sides.items() if all("step_s" in row for row in rows)}
    step_s = {name: max(row["step_s"] for row in rows) for name, rows in done.items()}
    theirs = {name: step_s.pop(name) for name in (FSDP, PIPELINE) if name in step_s}
    if step_s and theirs:
        plan, peer = min(step_s, key=step_s.__getitem__), min(theirs, key=theirs.__getitem__)
        ratio = step_s[plan] / theirs[peer]
        yield row_at_most("step of our fastest plan over the fastest peer's", ratio, 1.0, plan=plan, peer=peer)
    if small:
        losses = [row["loss"] for rows in done.values() for row in rows if row["loss"] is not None]
        yield row_at_most("relative difference of losses", (max(losses) - min(losses)) / min(losses), LOSS_LIMIT)
