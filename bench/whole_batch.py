"""Gradients of plans against one eager forward and backward over the whole batch, labels of uneven number.

12 models, 1, 2, 4 and 8 micro-batches, 1, 2 and 4 devices as a pipeline and as lanes, and of the labels
of each row none, more and more, or all but one of the whole batch ignored. The programs of all devices run in the
reference runtime, in this process. A row has a model's largest relative difference of a loss and, by 2-norm, of all
gradients; beside it that of plain micro-batches, each of which counts 1/M. With `--dropout` the eager module draws the
masks of the plan's micro-batches, so that masks that differed between plans would show.

Run: python bench/whole_batch.py [--models NAME ...] [--dropout SHARE] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.bench.peers import rows
from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.check.eager import module_runner
from penstock.compiler.check.model_draws import shapes_of_draws
from penstock.compiler.folder import COUNTS_FILE
from penstock.compiler.job.counts import BatchCounts, part_of
from penstock.compiler.loss import capture
from penstock.ir.errors import PenstockError
from penstock.runtime.device.file import open_directory
from penstock.runtime.model_names import ties_of
from penstock.runtime.reference.run import Reference
from penstock.runtime.source.trust import TRUSTED
from penstock.runtime.state.weights import LiveWeights, stage_buffers, stage_weights
from penstock.tests.compiler.loss.whole_batch import Step, eager_step
from penstock.tests.zoo import without_cache, zoo

MODELS = ("gpt2", "opt", "llama", "mistral", "qwen3", "mixtral", "t5", "bert", "roberta", "vit", "lstm", "encoder")
BATCH, MICRO_BATCHES, DEVICES = 8, (1, 2, 4, 8), (1, 2, 4)
SHARES = ("none", "uneven", "all but one")
STRATEGIES = {1: ("balanced",), 2: ("gpipe", "data-parallel"), 4: ("gpipe", "data-parallel")}
STATELESS = partial(torch.optim.SGD, lr=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--dropout", type=float, default=0.0, help="share of what is dropped")
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/whole_batch.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.models:
        rows.save("whole_batch", row_of(name, args.dropout), args.out)


def row_of(name: str, dropout: float) -> dict[str, Any]:
    """The largest differences of a model's plans, by the share of labels that are ignored."""
    model, batches = make_case(name, dropout)
    steps = {share: step for step, share in enumerate(SHARES)}  # a plan's first steps draw masks of their own each
    wanted = functools.cache(lambda share, m: drawn_step(model, batches[share], m if dropout else 1, steps[share]))
    worst = dict.fromkeys(SHARES, 0.0)
    plans = 0
    for machine, counter, m in machines(model, batches["none"]):
        plans += 1
        for share, batch in batches.items():
            found = step_of(machine, counter, batch, m, model)
            worst[share] = max(worst[share], found.distance(wanted(share, m)))
    row = {"model": name, "dropout": dropout, "plans": plans, "batch": BATCH, "difference": worst}
    if dropout:
        return row
    plain = {
        share: max(run_micro_batches(model, batch, m).distance(wanted(share, m)) for m in MICRO_BATCHES)
        for share, batch in batches.items()
    }
    return {**row, "each micro-batch counts 1/M": plain}


def drawn_step(model: nn.Module, batch: dict[str, Tensor], draws: int, step: int) -> Step:
    """One forward and one backward of the module itself over all rows, with the masks of `draws` micro-batches."""
    shapes = shapes_of_draws(capture(model, micro_batch_spec(batch, draws)))

    def loss_of(copied: nn.Module, whole: Any) -> Tensor:
        return module_runner(copied, "fp32", draws=draws, shapes=shapes)(whole, 0, 1, step)

    return eager_step(model, batch, loss_of)


def machines(model: nn.Module, batch: dict[str, Tensor]) -> Iterator[tuple[Reference, BatchCounts, int]]:
    for m, devices in itertools.product(MICRO_BATCHES, DEVICES):
        for strategy in STRATEGIES[devices]:
            if strategy == "data-parallel" and m < devices:
                continue  # every lane needs a micro-batch
            hardware = penstock.Hardware.cpu(num_devices=devices, memory="256MB", dram="2GB")
            try:
                job = penstock.compile(
                    model, hardware, example_inputs=batch, optimizer=STATELESS, strategy=strategy, micro_batches=m
                )
            except PenstockError as error:
                print(f"{type(model).__name__}, {strategy} on {devices}, {m} micro-batches: {error}", flush=True)
                continue
            yield *reference_of(job, model), m


def reference_of(job: penstock.Job, model: nn.Module) -> tuple[Reference, BatchCounts]:
    """The job's programs, with the model's weights, and what counts its batches."""
    source, interface = LiveWeights(model), job.folder.interface
    specs = list(interface.stages.values())
    weights = {name: w for spec in specs for name, w in stage_weights(source, spec).items()}
    buffers = {name: b for spec in specs for name, b in stage_buffers(source, spec).items()}
    with tempfile.TemporaryDirectory() as folder:
        files = open_directory(job.write(folder), interface, TRUSTED)
        counter = BatchCounts.from_file(job.folder.settings, Path(folder, COUNTS_FILE), {}, TRUSTED)
    stages = {name: kind for file in files for name, kind in file.stages.items()}
    return Reference(job.programs, stages, weights, None, buffers), counter


def step_of(machine: Reference, counter: BatchCounts, batch: dict[str, Tensor], m: int, model: nn.Module) -> Step:
    given = batch | counter.inputs(counter.count(batch, batch, m))
    loss = float(machine.step(given)["loss"])
    ties = ties_of(model)
    return Step(loss, {ties.get(name, name): gradient for name, gradient in machine.grads.items()})


def run_micro_batches(model: nn.Module, batch: dict[str, Tensor], m: int) -> Step:
    """Plain accumulation: the mean of the micro-batches' own means, those without labels left out."""
    steps = [eager_step(model, part_of(batch, i, m)) for i in range(m)]
    steps = [step for step in steps if step.loss == step.loss]
    gradients = {name: torch.stack([s.gradients[name] for s in steps]).sum(0) / m for name in steps[0].gradients}
    return Step(sum(step.loss for step in steps) / m, gradients)


def make_case(name: str, dropout: float) -> tuple[nn.Module, dict[str, dict[str, Tensor]]]:
    """A model, and a global batch for each share of ignored labels."""
    parts = [zoo()[name](dropout=dropout, seed=seed) for seed in range(BATCH // 2)]
    batch = {key: torch.cat([part[key] for _, part in parts]) for key in parts[0][1]}
    return without_cache(parts[0][0]), {share: {**batch, "labels": labels(batch["labels"], share)} for share in SHARES}


def labels(given: Tensor, share: str) -> Tensor:
    made = given.masked_fill(given == -100, 5)
    if share == "none":
        return made
    kept = torch.zeros_like(made, dtype=torch.bool)
    if share == "all but one":
        kept.view(-1)[kept.numel() // 2 + 1] = True
    elif made.dim() == 1:
        kept[::3] = True
    else:
        length = made.shape[1]
        kept = torch.arange(length) < torch.tensor([length, 2, 3, length - 1, 2, length, 4, 2])[:, None]
    return made.masked_fill(~kept, -100)


if __name__ == "__main__":
    main()
