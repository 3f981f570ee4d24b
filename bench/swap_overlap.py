"""One device too small for its model, over links of several speeds: a step against the larger of what it overlaps.

Computation alone is the same plan on links that are not held down. Transfers alone are the busiest direction's bytes at
the link's rate, measured as the time for which its stream was occupied. Backward computes three times as much as
forward (with rematerialisation) and moves the same weights; `phases_ratio` is what remains at best when neither phase
can help the other: the larger of computation and transfers of each phase, added up, over the larger of the sums.

Run: python bench/swap_overlap.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from functools import partial

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.timing import alternate, whole_step
from penstock.ir import ops
from penstock.runtime.simulate import Span, Timeline

TARGET = 1.15
MEMORY, VOCABULARY, LAYERS = "80MB", 1024, 16
SHARES = (0.5, 0.7, 1.0, 1.5, 2.0)  # transfers alone over computation alone
DIRECTIONS = (ops.H2D, ops.D2H)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = models.batch(vocabulary=VOCABULARY)
    with ExitStack() as stack:
        free = stack.enter_context(compile_job(batch, machine()))
        alone = alternate({"free": lambda: whole_step(free, batch)}, 3)["free"]
        moved = max(free.last.moved_bytes.values())
        for share in SHARES:
            slow = stack.enter_context(compile_job(batch, machine(moved / (share * min(alone)))))
            unbound = stack.enter_context(compile_job(batch, machine(), plan=slow.plan))
            measure(share, slow, unbound, batch, args.rounds)


def machine(rate: float | None = None) -> penstock.Hardware:
    return penstock.Hardware.cpu(num_devices=1, memory=MEMORY, dram="2GB", h2d=rate, d2h=rate)


def compile_job(batch: dict[str, torch.Tensor], hardware: penstock.Hardware, plan: penstock.Plan | None = None):
    return penstock.compile(
        models.gpt2(layers=LAYERS, vocabulary=VOCABULARY), hardware, example_inputs=batch, plan=plan, micro_batches=4,
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
    )  # fmt: skip


def measure(share: float, slow: penstock.Job, unbound: penstock.Job, batch: dict[str, torch.Tensor], rounds: int):
    """Time steps of the same plan with and without slow links, turn by turn, and save one row."""
    times_s = alternate(
        {"slow": lambda: whole_step(slow, batch), "unbound": lambda: whole_step(unbound, batch)}, rounds
    )
    moving = {d: phase_seconds(slow.timeline(), d) for d in DIRECTIONS}
    moving_s = max(sum(phases) for phases in moving.values())
    computing = phase_seconds(unbound.timeline(), ops.COMPUTE)
    at_best_s = sum(max(c, m) for c, m in zip(computing, moving[ops.H2D]))
    ratios = [step / max(compute, moving_s) for step, compute in zip(times_s["slow"], times_s["unbound"])]
    rows.save(
        "swap_overlap",
        {
            "model": f"gpt2 {LAYERS} x 256, vocabulary {VOCABULARY}, sequence 128, batch 8", "memory": MEMORY,
            "wanted_share": share, "stages": len(slow.plan.decisions.stages), "micro_batches": 4,
            "step": rows.spread(times_s["slow"]), "compute_alone": rows.spread(times_s["unbound"]),
            "transfers_alone_s": moving_s, "predicted_s": slow.plan.predicted.step_s,
            "ratio": statistics.median(times_s["slow"]) / max(statistics.median(times_s["unbound"]), moving_s),
            "ratio_of_pairs": statistics.median(ratios), "target": TARGET,
            "phases_ratio": at_best_s / max(sum(computing), moving_s),
        },
    )  # fmt: skip


def phase_seconds(timeline: Timeline, stream: str) -> tuple[float, float]:
    """Seconds for which a stream was occupied in forward and in backward. A fetch belongs to what needs it."""
    spans = [span for span in timeline.spans if span.stream == stream]
    backward_s = min(span.start_s for span in timeline.spans if span.op == "backward")

    def is_forward(span: Span) -> bool:
        return not span.text.partition(" ")[0].endswith("_b") if span.op == "fetch" else span.start_s < backward_s

    forward = [span for span in spans if is_forward(span)]
    return sum(s.end_s - s.start_s for s in forward), sum(s.end_s - s.start_s for s in spans if s not in forward)


if __name__ == "__main__":
    main()
