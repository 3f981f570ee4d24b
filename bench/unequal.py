"""Unequal devices: steps with equal shares of the batch and with shares by speed.

Run: python bench/unequal.py [--rounds 3] [--steps 12] [--duty 0.3] [--only simulated|rehearsed|throttled]

- simulated: GPT-2 medium (355 M) by data-parallel replicas on an RTX 4090 beside an RTX 3090, by their tables of rates.
- rehearsed: the same two plans in the processes and messages of a run, with timed waits for what the cards would do.
- throttled: two CPU devices in one process tree, of which one is throttled: its worker is stopped (SIGSTOP) for a part
  of every 100 ms, so that all it does takes longer. The job with equal shares finds it by its own timelines; its offer
  (`job.offer()`) is compiled as it says and runs under the same throttle. Rounds alternate; times are medians over all
  steps but the first two of each run. Both runs train on the same batch, and `losses_apart` compares them.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time
from functools import partial
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock
from penstock.bench.peers import rows
from penstock.compiler.models.named import find_model
from penstock.runtime.simulate import Timeline

TIERS = "partition-balanced, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, insert-optimizer"
EQUAL, BY_SPEED = (f"coarsen, {mesh}, {TIERS}" for mesh in ("mesh", "mesh{by_speed=true}"))
MACHINE, CARD_BATCH, CARD_SEQUENCE, CARD_MICRO_BATCHES = "rtx4090+rtx3090", 32, 1024, 16
PERIOD_S, MICRO_BATCHES, BATCH, SEQUENCE = 0.1, 8, 16, 64


class Throttle:
    """Lets a process run for the share `duty` of every `PERIOD_S`."""

    def __init__(self, pid: int, duty: float):
        self.pid, self.duty, self.ended = pid, duty, threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Throttle:
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self.thread.join()
        os.kill(self.pid, signal.SIGCONT)

    def _run(self) -> None:
        while not self.ended.is_set():
            os.kill(self.pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - self.duty))
            os.kill(self.pid, signal.SIGCONT)
            time.sleep(PERIOD_S * self.duty)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--duty", type=float, default=0.3)
    parser.add_argument("--only", choices=("simulated", "rehearsed", "throttled"))
    args = parser.parse_args()
    if args.only != "throttled":
        on_cards(rehearsed=args.only != "simulated")
    if args.only in (None, "throttled"):
        throttle(args.rounds, args.steps, args.duty)


def on_cards(rehearsed: bool) -> None:
    """Save a row of the simulated steps on `MACHINE`, and one of rehearsed ones."""
    model = find_model("gpt2-medium")
    jobs = {
        side: penstock.compile(
            model.on_meta(), MACHINE, example_inputs=model.batch_spec(CARD_BATCH, CARD_SEQUENCE), strategy=passes,
            micro_batches=CARD_MICRO_BATCHES, precision="bf16",
        )
        for side, passes in (("equal", EQUAL), ("by speed", BY_SPEED))
    }  # fmt: skip
    shares = jobs["by speed"].plan.decisions.mesh
    facts = {
        "machine_described": MACHINE, "model": "gpt2-medium", "batch": CARD_BATCH, "sequence": CARD_SEQUENCE,
        "micro_batches": CARD_MICRO_BATCHES, "shares": shares.micro_batches if shares else [],
    }  # fmt: skip
    steps = {side: job.simulate().step_s for side, job in jobs.items()}
    save("simulated", facts, steps)
    if rehearsed:
        save("rehearsed", facts, {side: min(job.rehearse().step_s for _ in range(2)) for side, job in jobs.items()})


def save(figure: str, facts: dict[str, Any], steps: dict[str, float]) -> None:
    gain = 1 - steps["by speed"] / steps["equal"]
    rows.save("unequal", {"figure": figure, **facts, "step_s": steps, "gain": gain})


def throttle(rounds: int, steps: int, duty: float) -> None:
    """Save a row of measured steps."""
    hardware = penstock.Hardware.cpu(num_devices=2)
    took: dict[str, list[float]] = {"equal": [], "by speed": []}
    losses: dict[str, list[float]] = {}
    offer = None
    for _ in range(rounds):
        with compile_job(hardware=hardware, strategy=EQUAL, micro_batches=MICRO_BATCHES) as job:
            seconds, losses["equal"], timelines = run(job, steps, duty)
            took["equal"] += seconds
            if offer is None:
                offer = job.offer(timelines)
                assert offer is not None, "the throttled device was not seen"
                print(offer)
        with compile_job(hardware=offer.hardware, plan=offer.plan) as job:
            seconds, losses["by speed"], _ = run(job, steps, duty)
            took["by speed"] += seconds
    assert offer is not None
    mesh = offer.plan.decisions.mesh
    facts = {
        "model": f"gpt2 6 x 192, sequence {SEQUENCE}, batch {BATCH}", "micro_batches": MICRO_BATCHES, "duty": duty,
        "shares": mesh.micro_batches if mesh else [], "seen_times": offer.times, "offered_gain": offer.gain,
        "losses_apart": max(abs(a / b - 1) for a, b in zip(losses["equal"], losses["by speed"], strict=True)),
        "rounds": rounds, "steps": steps,
    }  # fmt: skip
    save("throttled", facts, {side: statistics.median(values) for side, values in took.items()})


def make_case() -> tuple[GPT2LMHeadModel, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=6, n_embd=192, n_head=6, vocab_size=2048, n_positions=SEQUENCE, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 2048, (BATCH, SEQUENCE))
    return GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def compile_job(**options: Any) -> penstock.Job:
    model, batch = make_case()
    return penstock.compile(model, example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=1e-3), **options)


def run(job: penstock.Job, steps: int, duty: float) -> tuple[list[float], list[float], list[Timeline]]:
    """Seconds and timelines of all steps but the first two, and all losses, while the second device is throttled."""
    _, batch = make_case()
    losses, seconds, timelines = [float(job.step(batch))], [], []
    worker = job.driver.workers[1]  # type: ignore[attr-defined]
    with Throttle(worker.process.pid, duty):
        for _ in range(steps):
            begin_s = time.perf_counter()
            losses.append(float(job.step(batch)))
            timelines.append(job.timeline())  # when the step has ended
            seconds.append(time.perf_counter() - begin_s)
    return seconds[2:], losses, timelines[2:]


if __name__ == "__main__":
    main()
