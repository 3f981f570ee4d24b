"""Two processes over gloo, one thread each: Penstock against torch.distributed.pipelining on the same GPT-2.

Same split, same micro-batches, same optimizer; and what `compile` picks by itself against torch's best. Torch's tracer
unties shared weights without saying so, hence a model without ties on both sides.

Run: python bench/pipelining.py [--micro-batches M] [--rounds N]
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
from penstock.bench.peers.torch_pipeline import LR, TorchPipeline

TARGET_SAME, TARGET_AUTO = 1.0, 0.9
AUTO = "penstock, its own choice"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = {name: value for name, value in models.batch().items() if name != "attention_mask"}
    machine = penstock.Hardware.detect(measure=True)
    same = compile_job(batch, machine, strategy="gpipe", micro_batches=args.micro_batches)
    auto = compile_job(batch, machine)
    split = first_module(same.plan.decisions.stages[1])
    losses: dict[str, list[float]] = {"penstock": [], AUTO: [], "torch gpipe": [], "torch 1f1b": []}
    with ExitStack() as stack:
        ours = {"penstock": stack.enter_context(same), AUTO: stack.enter_context(auto)}
        theirs = {
            f"torch {name}": stack.enter_context(TorchPipeline(name, [split], args.micro_batches))
            for name in ("gpipe", "1f1b")
        }
        sides = {name: partial(run_job, job, batch, losses[name]) for name, job in ours.items()}
        sides |= {name: partial(run_peer, peer, losses[name]) for name, peer in theirs.items()}
        times_s = alternate(sides, args.rounds)
    medians = {name: statistics.median(times) for name, times in times_s.items()}
    fastest = {name: min(times) for name, times in times_s.items()}
    rows.save(
        "pipelining",
        {
            "model": "gpt2 8 x 256 untied, vocabulary 8192, sequence 128, batch 8", "split": split,
            "micro_batches": args.micro_batches, "times": {name: rows.spread(t) for name, t in times_s.items()},
            "same_ratio": medians["penstock"] / medians["torch gpipe"],
            "same_ratio_of_fastest": fastest["penstock"] / fastest["torch gpipe"], "same_target": TARGET_SAME,
            "auto_ratio": medians[AUTO] / min(medians["torch gpipe"], medians["torch 1f1b"]),
            "auto_ratio_of_fastest": fastest[AUTO] / min(fastest["torch gpipe"], fastest["torch 1f1b"]),
            "auto_target": TARGET_AUTO,
            "auto_plan": f"{len(auto.plan.decisions.stages)} stages, {auto.plan.micro_batches} micro-batches",
            "predicted": {"same_s": same.plan.predicted.step_s, "auto_s": auto.plan.predicted.step_s},
            "losses_of_last_step": {name: values[-1] for name, values in losses.items()},
        },
    )  # fmt: skip


def compile_job(batch: dict[str, torch.Tensor], machine: penstock.Hardware, **options: object) -> penstock.Job:
    return penstock.compile(
        models.gpt2(tied=False), machine, example_inputs=batch, optimizer=partial(torch.optim.AdamW, lr=LR), **options
    )


def first_module(blocks: list[str]) -> str:
    """The module with which a stage begins, for torch's split."""
    return next(name.partition("#")[0] for name in blocks if name.startswith("transformer.h."))


def run_job(job: penstock.Job, batch: dict[str, torch.Tensor], losses: list[float]) -> None:
    losses.append(whole_step(job, batch))


def run_peer(peer: TorchPipeline, losses: list[float]) -> None:
    losses.append(peer.step())


if __name__ == "__main__":
    main()
