"""A step in bf16-true and in bf16-pure against one in bf16-mixed, on CPU, all in one run.

The jobs take turns, step by step, so that whatever else the machine does falls on all of them alike. A row has the
median seconds of a step, its CPU seconds (of all threads), the ratios to bf16-mixed, the losses, and bytes by what they
are for. Llama upcasts its norms itself; GPT-2's are left to autocast.

Run: python bench/precision.py [--steps N] [--threads N] [--out FILE]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import penstock
from penstock.bench.peers import rows
from penstock.bench.peers.timing import whole_step

PRECISIONS = ("bf16-mixed", "bf16-true", "bf16-pure")
ROWS, LENGTH, MICRO_BATCHES, VOCABULARY, WIDTH, LAYERS = 8, 128, 2, 2048, 512, 4
ADAMW = partial(torch.optim.AdamW, lr=1e-4)


def models() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    llama = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=8,
        vocab_size=VOCABULARY,
    )  # fmt: skip
    gpt2 = GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=8, vocab_size=VOCABULARY, n_positions=LENGTH)
    return {"llama": LlamaForCausalLM(llama).train(), "gpt2": GPT2LMHeadModel(gpt2).train()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each job, after two others")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/precision.jsonl")
    args = parser.parse_args()
    for name, model in models().items():
        rows.save("precision", row_of(name, model, args.steps, args.threads), args.out)


def row_of(name: str, model: nn.Module, steps: int, threads: int) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    batch = {"input_ids": ids, "labels": ids}
    hardware = penstock.Hardware.cpu(num_devices=1, memory="4GB", dram="8GB", threads=threads)
    jobs = {
        precision: penstock.compile(
            model,
            hardware,
            example_inputs=batch,
            optimizer=ADAMW,
            micro_batches=MICRO_BATCHES,
            strategy="balanced",
            precision=precision,
        )
        for precision in PRECISIONS
    }
    wall_s, cpu_s, losses = ({p: list[float]() for p in jobs} for _ in range(3))
    for step in range(2 + steps):
        for precision, job in jobs.items():
            begin, began = time.perf_counter(), time.process_time()
            losses[precision].append(whole_step(job, batch))
            if step >= 2:
                wall_s[precision].append(time.perf_counter() - begin)
                cpu_s[precision].append(time.process_time() - began)
    row: dict[str, Any] = {
        "model": name, "rows": ROWS, "length": LENGTH, "micro_batches": MICRO_BATCHES, "threads": threads,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    for precision, job in jobs.items():
        assert job.plan.predicted is not None
        row[precision] = {
            "step_s": statistics.median(wall_s[precision]),
            "cpu_s": statistics.median(cpu_s[precision]),
            "predicted_s": job.plan.predicted.step_s,
            "peak_bytes": max(job.plan.predicted.peak_bytes.values()),
            "loss": [losses[precision][0], losses[precision][-1]],
        }
        job.close()
    for precision in PRECISIONS[1:]:
        for what in ("step_s", "cpu_s", "peak_bytes"):
            row[f"{precision} / bf16-mixed, {what}"] = round(row[precision][what] / row["bf16-mixed"][what], 3)
    return row


if __name__ == "__main__":
    main()
