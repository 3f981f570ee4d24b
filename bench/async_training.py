"""Asynchronous fine-tuning against synchronous on the same samples: what the staleness of a pipeline costs in loss.

GPT-2 and T5, small, are trained for a while on one part of English text (Python's own help pages, byte by byte), and
then fine-tuned on another part, with a learning rate that falls to zero: by eager PyTorch with an update per
mini-batch, and by jobs of four devices, one stage each and a process each, in which every micro-batch is such a
mini-batch. Both see the same mini-batches in the same order and make the same number of updates. Compared are the mean
losses of the last fifth of the mini-batches, and the losses of what was trained on a third part of the text.

Run: python bench/async_training.py [--calls N] [--before N] [--model gpt2|t5] [--weights WAY] [--out FILE]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.bench.peers import models, rows
from penstock.bench.peers.eager import Eager
from penstock.compiler.strategies import STRATEGIES

LAYERS, WIDTH, LENGTH, ANSWER, ROWS = 4, 64, 64, 16, 8
DEVICES, UPDATES_A_CALL = 4, 64
BEFORE_LR, LR = 1e-3, 3e-4
WEIGHTS = ("current", "stash", "predict")
HELD_OUT = 64  # mini-batches
TARGET = 1.02
Batch = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=16, help=f"of {UPDATES_A_CALL} updates each")
    parser.add_argument("--model", choices=sorted(MAKERS), help="default: both")
    parser.add_argument("--weights", choices=WEIGHTS, help="default: each")
    parser.add_argument("--before", type=int, default=1500, help="updates before, synchronous in any case")
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/async_training.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in [args.model] if args.model else sorted(MAKERS):
        for row in compare(name, args.calls, args.before, [args.weights] if args.weights else WEIGHTS):
            rows.save("async_training", row, args.out)


def compare(name: str, calls: int, before_updates: int, ways: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield one row for each way to treat weights."""
    make, pieces = MAKERS[name]
    model = make()
    counts = before_updates, calls * UPDATES_A_CALL, HELD_OUT
    before, text, held_out = (pieces(part, count) for part, count in enumerate(counts))
    first = Eager(model, 1, BEFORE_LR)
    for batch in before:
        first.step(batch)
    start = loss_of(model, held_out)
    eager = Eager(copy.deepcopy(model), 1, LR)
    schedule = falling(len(text))(eager.optimizer)
    losses = []
    for batch in text:
        losses.append(eager.step(batch))
        schedule.step()
    calls_losses = [sum(losses[i : i + UPDATES_A_CALL]) / UPDATES_A_CALL for i in range(0, len(text), UPDATES_A_CALL)]
    wanted = {"last_losses": tail(calls_losses), "held_out": loss_of(eager.model, held_out)}
    for weights in ways:
        known = {"model": name, "weights": weights, "updates": len(text), "samples": ROWS * len(text), "before": start}
        yield known | fine_tune(copy.deepcopy(model), weights, text, held_out, wanted)


def fine_tune(
    model: nn.Module, weights: str, text: list[Batch], held_out: list[Batch], wanted: dict[str, float]
) -> dict[str, Any]:
    job = penstock.compile(
        model, penstock.Hardware.cpu(num_devices=DEVICES), optimizer=partial(torch.optim.AdamW, lr=LR),
        lr_scheduler=falling(len(text)),
        example_inputs=join_batches(text[:UPDATES_A_CALL]), micro_batches=UPDATES_A_CALL,
        strategy=STRATEGIES["async"].replace("schedule-async", f"schedule-async{{weights={weights}}}"),
    )  # fmt: skip
    with job:
        starts = range(0, len(text), UPDATES_A_CALL)
        losses = [float(job.step(join_batches(text[i : i + UPDATES_A_CALL]))) for i in starts]
        job.sync()
    found = {"last_losses": tail(losses), "held_out": loss_of(model, held_out)}
    return {
        "stages": len(job.plan.decisions.stages), "staleness": job.plan.decisions.staleness,
        "micro_batches": UPDATES_A_CALL, "asynchronous": found, "synchronous": wanted,
        "ratio": {key: found[key] / wanted[key] for key in found}, "target_ratio": TARGET,
    }  # fmt: skip


def falling(updates: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    """A learning rate that falls linearly to zero over the updates, as in the paper for GPT-2."""
    return partial(torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=updates)


def tail(losses: list[float]) -> float:
    """The mean of the last fifth of the calls."""
    last = losses[-max(1, len(losses) // 5) :]
    return sum(last) / len(last)


def loss_of(model: nn.Module, batches: list[Batch]) -> float:
    model.eval()
    with torch.no_grad():
        found = [model(**batch).loss for batch in batches]
    model.train()
    return float(torch.stack(found).mean())


def join_batches(batches: list[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def stretches(part: int, count: int, length: int) -> list[Tensor]:
    """`count` mini-batches of stretches of `length` bytes from one of three parts of the text."""
    whole = "\n".join(topics.topics.values()).encode()
    data = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    begin, size = part * (len(data) // 3), len(data) // 3
    starts = torch.randint(0, size - length, (count, ROWS), generator=torch.Generator().manual_seed(part))
    return [torch.stack([data[begin + start : begin + start + length] for start in row]) for row in starts.tolist()]


def gpt2_batches(part: int, count: int) -> list[Batch]:
    found = stretches(part, count, LENGTH)
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x.clone()} for x in found]


def t5_batches(part: int, count: int) -> list[Batch]:
    """Batches in which a stretch is the input and the bytes after it are the labels."""
    found = [(x[:, :LENGTH].contiguous(), x[:, LENGTH:].contiguous()) for x in stretches(part, count, LENGTH + ANSWER)]
    return [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": y} for x, y in found]


def gpt2() -> nn.Module:
    return models.gpt2(layers=LAYERS, width=WIDTH, vocabulary=256)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=256, d_model=WIDTH, d_kv=32, d_ff=4 * WIDTH, num_layers=2, num_decoder_layers=2, num_heads=2,
        dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


MAKERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], list[Batch]]]] = {
    "gpt2": (gpt2, gpt2_batches),
    "t5": (t5, t5_batches),
}


if __name__ == "__main__":
    main()
