"""500 steps on English text with products in float8 beside bf16, emulated on a CPU.

The text is that of Python's own help pages, read byte by byte; a small Llama learns it from random weights, which all
runs begin with. Two micro-batches, weights and states in DRAM, fused AdamW on fp32 masters. Float8 with scales by rows
also runs as torchao's own layers in eager: the first losses are the same bits, the others differ as those of bf16 do,
since fused AdamW rounds a few masters otherwise where it steps other pieces of memory at once.

Run: python bench/float8_curve.py [--steps N] [--out FILE]
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.bench import loss_curve
from penstock.bench.peers import rows
from penstock.compiler.check.eager import use_torchao_layers
from penstock.tests.compiler.plain_precision import Plain

LAYERS, WIDTH, MICRO_BATCHES = 2, 64, 2
PRECISIONS = ("bf16-true", "fp8-rowwise", "fp8-tensorwise", "fp8-rowwise-gw-hp")
ALSO_EAGER = PRECISIONS[1:2]
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3, fused=True)
EVERY, LAST, HELD_OUT = 25, 50, 16  # steps between points of the curve, steps of the mean at its end, other batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, help="append the rows here; default: bench/results/float8_curve.jsonl")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for precision in PRECISIONS:
        rows.save("float8_curve", curve(precision, args.steps), args.out)


def curve(precision: str, steps: int) -> dict[str, Any]:
    """Train in one precision; the row has the losses, and that of text which no step has seen."""
    text = loss_curve.batches(steps + HELD_OUT)
    train, other = text[:steps], text[steps:]
    job = penstock.compile(
        model(), penstock.Hardware.cpu(num_devices=1, memory="64MB"), example_inputs=train[0], optimizer=OPTIMIZER,
        strategy="mobius", micro_batches=MICRO_BATCHES, precision=precision,
    )  # fmt: skip
    eager = None
    if precision in ALSO_EAGER:
        eager = Plain(use_torchao_layers(model(), job.plan, "cpu"), OPTIMIZER, MICRO_BATCHES)
    with job:
        found = [float(job.step(batch)) for batch in train]
        held_out = sum(float(job.evaluate(batch)["loss"]) for batch in other) / len(other)
    wanted = [] if eager is None else [eager.step(batch) for batch in train]
    return {
        "model": f"llama {LAYERS} x {WIDTH}, 256 bytes, sequence {loss_curve.LENGTH}", "text": "pydoc_data.topics",
        "precision": precision, "steps": steps, "batch": loss_curve.BATCH, "micro_batches": MICRO_BATCHES,
        "layers_in_float8": len(job.plan.decisions.float8), "mean_of_last_losses": sum(found[-LAST:]) / LAST,
        "loss_of_other_text": held_out,
        "largest_loss_difference_from_eager": max((abs(a - b) for a, b in zip(found, wanted)), default=None),
        "mean_of_last_losses_in_eager": sum(wanted[-LAST:]) / LAST if wanted else None,
        "first_losses_equal": None if eager is None else found[0] == wanted[0],
        "curve": {str(step): found[step] for step in [*range(0, steps, EVERY), steps - 1]},
    }  # fmt: skip


def model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=LAYERS, hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=176, vocab_size=256, max_position_embeddings=loss_curve.LENGTH, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


if __name__ == "__main__":
    main()
