"""1F1B and interleaved 1F1B over 2 and 4 processes, one thread each: Penstock against torch.distributed.pipelining's
same schedule, on the same GPT-2 with the same split; and on a T5, which torch's pipeline refuses.

Torch's tracer refuses edges between stages that are not neighbours where a process has several stages (GPT-2's causal
mask), so its stages are cut by hand; for 1F1B the traced ones run beside them, and the faster of the two counts.

Run: python bench/schedules.py [--processes 2,4] [--schedules 1f1b,interleaved] [--micro-batches M] [--rows N]
[--rounds N]
"""

from __future__ import annotations

import argparse
import re
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.timing import alternate, whole_step
from penstock.bench.peers.torch_pipeline import LR, TorchPipeline

TARGET = 1.0
OURS, BY_HAND, TRACED = "penstock", "torch, stages by hand", "torch, traced"
MODULE = re.compile(r".*\.(h|block)\.\d+|.*(ln_f|final_layer_norm|lm_head)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--schedules", default="1f1b,interleaved")
    parser.add_argument("--models", default="untied_gpt2,t5")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for model in args.models.split(","):
        for world in map(int, args.processes.split(",")):
            for schedule in args.schedules.split(","):
                rows.save("schedules", compare(model, schedule, world, args))


def compare(model: str, schedule: str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    """Time both sides, turn by turn; returns the row with times and losses."""
    batch = models.batch(args.rows)
    if model == "untied_gpt2":
        del batch["attention_mask"]  # all ones; torch's stages take none
    job = penstock.compile(
        models.build_model(model),
        penstock.Hardware.cpu(num_devices=world, memory="2GB", dram="8GB"),
        example_inputs=batch,
        optimizer=partial(torch.optim.AdamW, lr=LR),
        strategy=schedule,
        micro_batches=args.micro_batches,
    )
    splits = [begins_with(blocks) for blocks in job.plan.decisions.stages[1:]]
    losses: dict[str, list[float]] = {OURS: []}
    with ExitStack() as stack:
        ours = stack.enter_context(job)
        sides: dict[str, Any] = {OURS: lambda: losses[OURS].append(whole_step(ours, batch))}
        refused: dict[str, str] = {}
        for name, by_hand in ((BY_HAND, True), (TRACED, False)):
            if by_hand and model != "untied_gpt2":
                continue
            try:
                peer = TorchPipeline(
                    schedule, splits, args.micro_batches, world, by_hand=by_hand, model=model, rows=args.rows
                )
                stack.enter_context(peer)
                losses[name] = [peer.step()]  # raises here if torch refuses to run at all
            except RuntimeError as error:
                refused[name] = str(error)
                continue
            sides[name] = lambda peer=peer, name=name: losses[name].append(peer.step())
        losses[OURS].append(whole_step(ours, batch))
        times_s = alternate(sides, args.rounds, warm_up=1)
    return {
        "model": model, "schedule": schedule, "processes": world, "micro_batches": args.micro_batches,
        "sequences": args.rows, "stages": len(splits) + 1, "splits": splits,
        "times": {name: rows.spread(found) for name, found in times_s.items()},
        "target": TARGET, **ratios(times_s),
        "losses_of_first_step": {name: found[0] for name, found in losses.items()},
        "losses_of_last_step": {name: found[-1] for name, found in losses.items()},
        "torch_refuses": refused,
    }  # fmt: skip


def begins_with(blocks: list[str]) -> str:
    """The module with which a stage begins, for torch's split."""
    names = (name.partition("#")[0] for name in blocks)
    return next(name for name in names if MODULE.fullmatch(name))


def ratios(times_s: dict[str, list[float]]) -> dict[str, float]:
    """Ratios of our time to that of torch's faster side; empty if torch does not run."""
    others = [name for name in times_s if name != OURS]
    if not others:
        return {}
    medians = {name: statistics.median(found) for name, found in times_s.items()}
    best = min(others, key=medians.__getitem__)
    pairs = [a / b for a, b in zip(times_s[OURS], times_s[best])]
    return {
        "ratio": medians[OURS] / medians[best],
        "ratio_of_pairs": statistics.median(pairs),
        "ratio_of_fastest": min(times_s[OURS]) / min(min(times_s[name]) for name in others),
    }


if __name__ == "__main__":
    main()
