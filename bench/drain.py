"""Steps one right after another against steps that each wait for the end of the one before ("drained").

Simulated: one model for a GPU of 24 GB, by the same plan. Measured: GPT-2 on CPU devices whose weights are in DRAM,
with links held down; and linear layers of which the first ones are frozen, on two CPU devices: one computes those of
the next step beside the other's backward. Both sides are the same plan in one run, in turns of a few steps each.
`job.last` waits for the end of a step, `job.step` only for its loss.

Run: python bench/drain.py [--rounds N] [--only simulated|swapped|frozen]
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock
from penstock.bench.peers import models, rows
from penstock.compiler.models.named import find_model

PRESETS = ("rtx4090x1",)
MODEL, BATCH, SEQUENCE = "llama-8b", 8, 2048
STEPS_A_TURN = 3
FROZEN, TRAINED, WIDTH = 12, 4, 1024
MEMORY, VOCABULARY, LAYERS = "24MB", 1024, 4


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", choices=("simulated", "swapped", "frozen"))
    args = parser.parse_args()
    if args.only in (None, "simulated"):
        for preset in PRESETS:
            simulate_plan(preset)
    if args.only in (None, "swapped"):
        for num_devices in (1, 2):
            swapping_job(num_devices, args.rounds)
    if args.only in (None, "frozen"):
        freeze(args.rounds)


def simulate_plan(preset: str) -> None:
    """Save the seconds of a step of the chosen plan, with and without the drain."""
    named = find_model(MODEL)
    job = penstock.compile(
        named.on_meta(),
        penstock.Hardware.preset(preset),
        example_inputs=named.batch_spec(BATCH, SEQUENCE),
        precision="bf16",
        optimizer=partial(torch.optim.AdamW, lr=1e-5),
    )
    save("simulated", {"model": MODEL, "hardware": preset, "batch": BATCH, "sequence": SEQUENCE}, *both(job), job)


def both(job: penstock.Job) -> tuple[float, float]:
    """Simulated seconds of a step: drained, and one after another."""
    timeline = job.simulate()
    return timeline.from_rest_s, timeline.step_s


def swapping_job(num_devices: int, rounds: int) -> None:
    """Weights come from DRAM, over links that are held down."""
    batch = models.batch(vocabulary=VOCABULARY)
    machine = penstock.Hardware.cpu(num_devices=num_devices, memory=MEMORY, dram="2GB", h2d="400MB/s", d2h="400MB/s")
    where = {"model": f"gpt2 {LAYERS} x 256", "hardware": f"{num_devices} CPU devices of {MEMORY}, links 400 MB/s"}
    with penstock.compile(
        models.gpt2(layers=LAYERS, vocabulary=VOCABULARY), machine, example_inputs=batch, micro_batches=4,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    ) as job:  # fmt: skip
        measured_blocks(job, batch, where, rounds)


def freeze(rounds: int) -> None:
    """One micro-batch: from rest each device waits while the other computes."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(FROZEN + TRAINED)))
    layers[:FROZEN].requires_grad_(False)
    batch = {"input": torch.randn(WIDTH, WIDTH)}
    machine = penstock.Hardware.detect().with_(num_devices=2)
    assert machine.devices[0].kind == "cpu"
    where = {"model": f"{FROZEN} frozen + {TRAINED} x linear {WIDTH}", "hardware": "2 CPU devices, as detected"}
    with penstock.compile(
        layers, machine, example_inputs=batch, micro_batches=1, strategy="gpipe",
        optimizer=partial(torch.optim.SGD, lr=1e-3), loss_fn=lambda output, batch: output.square().mean(),
    ) as job:  # fmt: skip
        measured_blocks(job, batch, where, rounds)


def measured_blocks(job: penstock.Job, batch: Any, where: dict[str, Any], rounds: int) -> None:
    """Save the seconds of a step of one plan on CPU devices, both ways in turns."""
    turns: dict[str, list[float]] = {"drained": [], "one_after_another": []}
    losses: list[float] = []
    for number in range(-1, rounds):
        for side in sorted(turns, reverse=number % 2 == 1):
            took_s = turn(job, batch, side == "drained", losses)
            if number >= 0:
                turns[side].append(took_s)
    drained_s, steady_s = (statistics.median(turns[side]) for side in turns)
    pairs = [b / a for a, b in zip(turns["drained"], turns["one_after_another"])]
    more = {side: rows.spread(times_s) for side, times_s in turns.items()}
    more |= {"ratio_of_pairs": statistics.median(pairs), "simulated_s": dict(zip(turns, both(job)))}
    assert losses[-1] < losses[0]
    save("measured", where, drained_s, steady_s, job, more)


def turn(job: penstock.Job, batch: Any, drained: bool, losses: list[float]) -> float:
    """Seconds a step, of a few steps from rest to rest."""
    begin_s = time.perf_counter()
    for _ in range(STEPS_A_TURN):
        losses.append(float(job.step(batch)))
        if drained:
            assert job.last is not None
    assert job.last is not None
    return (time.perf_counter() - begin_s) / STEPS_A_TURN


def save(
    kind: str,
    where: dict[str, Any],
    drained_s: float,
    steady_s: float,
    job: penstock.Job,
    more: dict[str, Any] | None = None,
) -> None:
    plan = job.plan
    found = {
        "kind": kind, **where, "strategy": plan.strategy, "stages": len(plan.decisions.stages),
        "micro_batches": plan.micro_batches, "drained_s": drained_s, "one_after_another_s": steady_s,
        "ratio": steady_s / drained_s, **(more or {}),
    }  # fmt: skip
    rows.save("drain", found)


if __name__ == "__main__":
    main()
