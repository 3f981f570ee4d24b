"""Layers of Llama-8B over one long row on 24 GB of a GPU, trained in full: the section `long-sequence`.

Token-wise parts run in tiles, what backward needs waits in DRAM, and so do weights and states (`ALONE` of
`bench/longest_sequence.py`). The first loss is compared with a forward pass of the unmodified model on the whole card,
with its logits in pieces, since whole they are 67 GB at 131,072 tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.bench.gpu.inside import look_inside
from penstock.bench.longest_sequence import ALONE
from penstock.bench.peers.gpu_bounds import bench_of
from penstock.bench.peers.gpu_reservoir import SEARCH_S, give_values, limit_memory, predictions
from penstock.bench.peers.gpu_setup import GIB, Row, Setup, holds, note_call, row_at_most
from penstock.compiler.models.named import find_model

NAME, LENGTH = "llama-8b:num_hidden_layers=8", 131_072
SMALL_NAME = "llama-8b:num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=4," \
    "num_key_value_heads=2,head_dim=16,vocab_size=256"  # fmt: skip
SMALL_LENGTH, SMALL_MEMORY = 512, "192MB"
LOSS_LIMIT = 1e-2  # of bf16 weights and sums over thousands of tokens
ROWS_OF_LOGITS = 4096
SHARE = 0.4  # of the section's time, in which steps begin


def long_sequence(setup: Setup) -> Iterator[Row]:
    """Run the section: a step's time and peaks beside the predicted ones, and the first loss beside eager's."""
    bench = bench_of(setup, None if setup.small else "24GB")
    hardware = bench.hardware.with_(memory=SMALL_MEMORY) if setup.small and setup.on_gpu else bench.hardware
    length = SMALL_LENGTH if setup.small else LENGTH
    name = SMALL_NAME if setup.small else NAME
    named = find_model(f"{name},max_position_embeddings={length}")
    spec = {key: row for key, row in named.batch_spec(1, length).items() if key != "attention_mask"}
    model, begin_s = named.on_meta(), time.perf_counter()
    job = penstock.compile(
        model, hardware, example_inputs=spec, optimizer=partial(torch.optim.AdamW, lr=1e-5), strategy=ALONE,
        precision="bf16-true", search_s=SEARCH_S, ssd_dirs=None if bench.directory is None else [bench.directory],
    )  # fmt: skip
    give_values(model)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are computed, not drawn
    words = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    batch = {key: words for key in spec}
    what: Row = {
        "model": name, "sequence": length, "parameters": sum(param.numel() for param in model.parameters()),
        "device_bytes": hardware.devices[0].memory_bytes, "precision": "bf16-true",
    }  # fmt: skip
    yield note_call("seconds of planning", time.perf_counter() - begin_s, **what)
    begin_s = time.perf_counter()
    with limit_memory(bench), job:
        losses, times_s = [float(job.step(batch))], list[float]()
        yield note_call("seconds to start and for the first step", time.perf_counter() - begin_s, **what)
        while not times_s or (time.perf_counter() - begin_s < SHARE * setup.seconds and len(times_s) < 3):
            step_begin_s = time.perf_counter()
            losses.append(float(job.step(batch)))
            times_s.append(time.perf_counter() - step_begin_s)
        step_s = statistics.median(times_s)
        what |= {"step_s": step_s, "steps": len(times_s), "tiles": max(job.plan.decisions.tiles.values(), default=0)}
        yield holds("the loss falls", losses[-1] < losses[0], losses=losses, **what)
        yield note_call("tokens a second", length / step_s, **what)
        yield from predictions(bench, job, step_s, what)
        if setup.on_gpu:
            yield note_call("reserved by the allocator, GiB", torch.cuda.max_memory_reserved() / GIB, **what)
        yield from look_inside(setup, job, batch, what)
    setup.tidy()
    wanted = eager_loss(model, batch, setup.device)
    apart = abs(losses[0] / wanted - 1)
    yield row_at_most("difference of the first loss from eager's", apart, LOSS_LIMIT, eager=wanted)


@torch.no_grad()
def eager_loss(model: nn.Module, batch: Mapping[str, Tensor], device: str) -> float:
    """The loss of the unmodified model in bf16, whose head sees some rows at a time."""
    model = model.to(device, torch.bfloat16).train()
    words = batch["input_ids"].to(device)
    found = model.model(input_ids=words, use_cache=False).last_hidden_state[0, :-1]
    wanted = batch["labels"].to(device)[0, 1:]
    total = 0.0
    for rows, labels in zip(found.split(ROWS_OF_LOGITS), wanted.split(ROWS_OF_LOGITS), strict=True):
        total += float(F.cross_entropy(model.lm_head(rows).float(), labels, reduction="sum"))
    return total / wanted.numel()
