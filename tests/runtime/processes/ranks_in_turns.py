"""A script for torchrun: ranks that take turns on a link, of which one may meet a fault while it holds the link.

    torchrun --nproc-per-node=N -m penstock.tests.runtime.processes.ranks_in_turns FOLDER [SIGNAL RANK]

Every rank that can writes FOLDER/rankR.json: losses, weights after each step, when it held which link for which turn,
and the error that ended it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from penstock.ir.errors import PenstockError
from penstock.ir.machine.hardware import Hardware
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.processes.local import start_driver
from penstock.runtime.processes.setup import RunSetup
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.turns import TurnClient
from penstock.tests.ir.program.handmade import in_turns, pipeline
from penstock.tests.runtime.generated_files import write_chain

WIDTH, ROWS, MICRO_BATCHES, STEPS, CHUNK_BYTES, LEARNING_RATE = 64, 4, 4, 3, 4096, 0.1
FAULT_STEP, TIMEOUT_S = 1, 8.0


def weights_at_first(stages: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=made) / 8 for _ in range(stages)]


def batch_of(step: int) -> torch.Tensor:
    return torch.randn(ROWS * MICRO_BATCHES, WIDTH, generator=torch.Generator().manual_seed(step))


def main(folder: Path, fault: str = "", victim: str = "") -> None:
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    (folder / rank).mkdir()
    programs = in_turns(pipeline(world, 2 * world, MICRO_BATCHES, width=WIDTH, rows=ROWS))
    files = write_chain(folder / rank, programs, WIDTH)
    sgd = OptimizerSpec.from_callable(partial(torch.optim.SGD, lr=LEARNING_RATE))
    per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    hardware = Hardware.cpu(world, memory="8MB", hosts=world // per_host)
    driver = start_driver(RunSetup(files, programs[0].interface, hardware, sgd, timeout_s=TIMEOUT_S, trust=TRUSTED))
    for i, weight in enumerate(weights_at_first(2 * world)):
        driver.load_stage(f"stage{i}", {f"layer{i}.weight": weight}, {})
    pacing = driver.session.pacing  # type: ignore[attr-defined]
    pacing.chunk_bytes = CHUNK_BYTES
    found: dict[str, Any] = {"losses": [], "weights": [], "held": [], "address": pacing.turns.address, "error": ""}
    hold, step = TurnClient.hold, 0

    @contextmanager
    def watch(client: TurnClient, turn: int) -> Iterator[None]:
        with hold(client, turn):
            begin_s = time.monotonic()
            if fault and rank == victim and step == FAULT_STEP:
                os.kill(os.getpid(), getattr(signal, fault))
            yield
            found["held"].append([turn, begin_s, time.monotonic()])

    TurnClient.hold = watch  # type: ignore[method-assign, assignment]
    try:
        for step in range(STEPS):
            losses = driver.step({"x": batch_of(step)}).values["loss"]
            found["losses"].append([loss.item() for loss in losses])
            states = [driver.call("stage_state", device, {"stage": f"stage{i}"}) for i, device in _homes(world)]
            found["weights"].append([next(iter(tensors.values())).tolist() for _, tensors in states])
    except PenstockError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    (folder / f"{rank}.json").write_text(json.dumps(found))
    (folder / f"{rank}.json").rename(folder / f"rank{rank}.json")  # whole, when another process sees it
    driver.close()


def _homes(world: int) -> list[tuple[int, int]]:
    """Each stage and its device."""
    return [(stage, stage % world) for stage in range(2 * world)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
