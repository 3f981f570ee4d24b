"""Reports to look at: of a small model on two devices before and after steps, and of 10,000 instructions."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import penstock

MANY = 10_000


def job_of(
    layers: int = 4,
    rows: int = 4,
    micro_batches: int = 2,
    width: int = 32,
    sequence: int = 16,
    memory: str = "100MB",
    **more: object,
) -> tuple[penstock.Job, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=4, vocab_size=256, n_positions=64, attn_pdrop=0.0, embd_pdrop=0.0,
        resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    ids = torch.randint(0, 256, (rows, sequence))
    batch = {"input_ids": ids, "labels": ids.clone()}
    hardware = penstock.Hardware.cpu(num_devices=2, memory=memory, dram="1GB")
    options = {"strategy": "mobius", "micro_batches": micro_batches, **more}
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    model = GPT2LMHeadModel(config)
    job = penstock.compile(model, hardware, example_inputs=batch, optimizer=optimizer, **options)  # type: ignore[arg-type]
    return job, batch


def many_spans(path: Path) -> int:
    """The report of a step of 10,000 instructions and more; how many occupy a stream."""
    pipeline = (
        "coarsen, partition-balanced{stages=48}, map-round-robin, schedule-pipeline, insert-remat, insert-fetch, "
        "insert-optimizer"
    )
    job, _ = job_of(layers=46, rows=36, micro_batches=36, strategy=pipeline)
    job.report(path, what_if=False)
    return len(job.simulate().spans)
