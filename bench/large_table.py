"""A language model whose table is larger than its device, in parts: predicted and counted peak, and eager's loss.

One CPU device of 24 MB, a tied table of 65536 rows of 128 (32 MiB in fp32, three times as much with its gradients), two
layers of GPT-2, 8 rows of 32 tokens, AdamW with its states in DRAM.

Run: python bench/large_table.py [--steps N] [--out FILE]
"""

from __future__ import annotations

import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import penstock
from penstock.bench.peers import rows
from penstock.ir.errors import DoesNotFit

MEMORY, ROWS, WIDTH, BATCH, SEQUENCE = "24MB", 65536, 128, 8, 32
ADAM = partial(torch.optim.AdamW, lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the row here; default: bench/results/large_table.jsonl")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=ROWS, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(0, ROWS, (BATCH, SEQUENCE))
    rows.save("large_table", row_of(model, {"input_ids": ids, "labels": ids}, args.steps), args.out)


def row_of(model: Any, batch: dict[str, torch.Tensor], steps: int) -> dict[str, Any]:
    eager = copy.deepcopy(model)
    hardware = penstock.Hardware.cpu(num_devices=1, memory=MEMORY, dram="4GB")
    options = {"example_inputs": batch, "optimizer": ADAM, "micro_batches": 2}
    whole = "chunk-loss, coarsen, partition-balanced, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, "
    try:
        penstock.compile(copy.deepcopy(model), hardware, strategy=whole + "insert-optimizer", **options)
        missing = 0
    except DoesNotFit as error:
        missing = error.missing_bytes
    with penstock.compile(model, hardware, search_s=5.0, **options) as job:
        losses = [float(job.step(batch)) for _ in range(steps)]
        assert job.plan.predicted is not None and job.last is not None
        predicted, counted = job.plan.predicted.peak_bytes["cpu0"], job.last.peak_bytes["cpu0"]
    optimizer = ADAM(eager.parameters())
    expected = []
    for _ in range(steps):
        loss = eager(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    return {
        "table_bytes": 4 * ROWS * WIDTH,
        "device_bytes": hardware.devices[0].memory_bytes,
        "missing_bytes_whole": missing,
        "parts": {name: len(found) - 1 for name, found in job.plan.decisions.vocabulary.items()},
        "stages": len(job.plan.decisions.stages),
        "peak_bytes_predicted": predicted,
        "peak_bytes_counted": counted,
        "loss_difference": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
    }


if __name__ == "__main__":
    main()
