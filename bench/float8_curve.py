"""500 steps on English text with products in float8 beside bf16, emulated on a CPU.

The text is that of Python's own help pages, read byte by byte; a small Llama learns it from random weights, which all
runs begin with. Two micro-batches, weights and states in DRAM, fused AdamW on fp32 masters. The runs are processes of
their own, all at once: no time is measured.

Run: python bench/float8_curve.py [--steps N] [--out FILE]
"""

from __future__ import annotations

import argparse
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.bench import loss_curve
from penstock.bench.peers import rows

LAYERS, WIDTH, BATCH, LENGTH, MICRO_BATCHES = 2, 64, 4, 32, 2
PRECISIONS = ("bf16-true", "fp8-rowwise", "fp8-tensorwise", "fp8-rowwise-gw-hp")
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)
EVERY, LAST, HELD_OUT = 25, 50, 16  # steps between points of the curve, steps of the mean at its end, other batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/float8_curve.jsonl")
    args = parser.parse_args()
    with ProcessPoolExecutor(len(PRECISIONS), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(curve, precision, args.steps) for precision in PRECISIONS]):
            rows.save("float8_curve", done.result(), args.out)


def curve(precision: str, steps: int) -> dict[str, Any]:
    """Train in one precision; the row has the losses, and that of text which no step has seen."""
    torch.set_num_threads(1)
    text = batches(steps + HELD_OUT)
    train, other = text[:steps], text[steps:]
    job = penstock.compile(
        model(), penstock.Hardware.cpu(num_devices=1, memory="64MB"), example_inputs=train[0], optimizer=OPTIMIZER,
        strategy="mobius", micro_batches=MICRO_BATCHES, precision=precision,
    )  # fmt: skip
    with job:
        found = [float(job.step(batch)) for batch in train]
        held_out = sum(float(job.evaluate(batch)["loss"]) for batch in other) / len(other)
    return {
        "model": f"llama {LAYERS} x {WIDTH}, 256 bytes, sequence {LENGTH}", "text": "pydoc_data.topics",
        "precision": precision, "steps": steps, "batch": BATCH, "micro_batches": MICRO_BATCHES,
        "layers_in_float8": len(job.plan.decisions.float8), "mean_of_last_losses": sum(found[-LAST:]) / LAST,
        "loss_of_other_text": held_out,
        "curve": {str(step): found[step] for step in [*range(0, steps, EVERY), steps - 1]},
    }  # fmt: skip


def batches(count: int) -> list[dict[str, Tensor]]:
    return [{name: x[:BATCH, :LENGTH] for name, x in batch.items()} for batch in loss_curve.batches(count)]


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=176, vocab_size=256, max_position_embeddings=LENGTH, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


if __name__ == "__main__":
    main()
