"""Steps of one GPT on all GPUs of a host by plans of Penstock, FSDP2 and torch.distributed.pipelining. Run by torchrun
with a rank for each GPU, one side after the other in the same processes; each rank prints a line of JSON a side.

All sides train the same weights on the same global batch with AdamW. Small, they compute in fp32, so that losses can be
compared; else Penstock in "bf16-true", FSDP2 in bf16 on fp32 weights, and the pipeline with weights and states in bf16,
which takes the least memory.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.bench.peers.gpt import Gpt, GptSize, batch_of, gpt
from penstock.bench.peers.timing import whole_step
from penstock.errors import PenstockError

FSDP, PIPELINE = "fsdp2, full shard", "torch pipelining, 1f1b"
WARM_UP, ROUNDS = 2, 3
Step = Callable[[], float | None]  # the mean loss where this rank knows it


class Slice(nn.Module):
    """Some blocks of a GPT: with its tables where they are the first, with its head where they are the last."""

    def __init__(self, model: Gpt, rank: int, world: int):
        super().__init__()
        ends = [round(len(model.blocks) * i / world) for i in range(world + 1)]
        begin, end = list(pairwise(ends))[rank]
        self.blocks = model.blocks[begin:end]
        self.words, self.places = (model.words, model.places) if rank == 0 else (None, None)
        self.norm, self.head = (model.norm, model.head) if rank == world - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.words is not None:
            x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))  # type: ignore[misc]
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))  # type: ignore[misc]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@contextmanager
def penstock_plan(settings: Mapping[str, Any], model: Gpt, batch: dict[str, Tensor], name: str) -> Iterator[Step]:
    plan = settings["plans"][name]
    job = penstock.compile(
        model, penstock.Hardware.load(settings["hardware"]).with_(**plan["hardware"]), example_inputs=batch,
        optimizer=partial(torch.optim.AdamW, lr=settings["lr"]), strategy=plan["strategy"],
        micro_batches=settings["micro_batches"], precision="fp32" if settings["small"] else "bf16-true",
    )  # fmt: skip
    with job:
        yield partial(whole_step, job, batch)


@contextmanager
def fsdp(settings: Mapping[str, Any], model: Gpt, batch: dict[str, Tensor], name: str) -> Iterator[Step]:
    """An equal share of the micro-batches on each rank; gradients are scattered with the last."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    half = MixedPrecisionPolicy() if settings["small"] else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = model.cuda()
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], fused=True)
    share = settings["micro_batches"] // world
    own = {key: value.chunk(world)[rank].cuda() for key, value in batch.items()}
    pieces = [dict(zip(own, parts)) for parts in zip(*(value.chunk(share) for value in own.values()))]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for piece in pieces:
            model.set_requires_gradient_sync(piece is pieces[-1])  # type: ignore[operator]
            loss = model(**piece)["loss"]
            (loss / len(pieces)).backward()
            losses.append(loss.detach())
        optimizer.step()
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return float(mean) / world

    yield step


@contextmanager
def pipeline(settings: Mapping[str, Any], model: Gpt, batch: dict[str, Tensor], name: str) -> Iterator[Step]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda", torch.cuda.current_device())
    own = Slice(model, rank, world).to(device, torch.float32 if settings["small"] else torch.bfloat16)
    schedule = Schedule1F1B(PipelineStage(own, rank, world, device), settings["micro_batches"], loss_fn=loss_of)
    optimizer = torch.optim.AdamW(own.parameters(), lr=settings["lr"], fused=True)
    words, labels = batch["words"].to(device), batch["labels"].to(device)

    def step() -> float | None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        schedule.step(*([words] if rank == 0 else []), **({"target": labels, "losses": losses} if own.head else {}))
        optimizer.step()
        torch.cuda.synchronize()
        dist.barrier()
        return float(torch.stack(losses).detach().mean()) if losses else None

    yield step


def measure(settings: Mapping[str, Any], name: str, rank: int) -> dict[str, Any]:
    """The median seconds of a step, the last loss, and what torch reserved on this GPU."""
    side = {FSDP: fsdp, PIPELINE: pipeline}.get(name, penstock_plan)
    size = GptSize(**settings["size"])
    torch.cuda.reset_peak_memory_stats()
    with side(settings, gpt(size).train(), batch_of(size, settings["rows"]), name) as step:
        times_s = []
        for _ in range(WARM_UP + ROUNDS):
            begin_s = time.perf_counter()
            loss = step()
            times_s.append(time.perf_counter() - begin_s)
    reserved_gib = torch.cuda.max_memory_reserved() / 2**30
    return {
        "rank": rank, "side": name, "step_s": statistics.median(times_s[WARM_UP:]), "loss": loss,
        "reserved_gib": reserved_gib,
    }  # fmt: skip


def main(settings: Mapping[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for name in (*settings["plans"], FSDP, PIPELINE):
        if name == FSDP:
            dist.init_process_group("nccl")
        try:
            row = measure(settings, name, rank)
        except PenstockError as error:  # a plan that does not fit, say: on every rank alike
            row = {"rank": rank, "side": name, "refused": str(error)}
        sys.stdout.write(json.dumps(row) + "\n")  # at once: the ranks share a pipe
        sys.stdout.flush()
        gc.collect()
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
