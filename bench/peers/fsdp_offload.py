"""FSDP2 with `CPUOffloadPolicy` on one CPU process: all weights and states stay in RAM, one shard per block.

It is the reference for what torch itself offers, and has no disk tier. Run by `children.Child`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))


def prepare(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A GPT-2 of the settings' size under FSDP2; see `children.serve`."""
    import models
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    model = models.gpt2(settings["layers"], settings["width"], settings["tied"], settings["vocabulary"]).train()
    if settings["checkpoint"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = CPUOffloadPolicy(pin_memory=False)
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], fused=True)
    batch = models.batch(settings["batch"], vocabulary=settings["vocabulary"])
    pieces = [dict(zip(batch, parts)) for parts in zip(*(v.chunk(settings["micro_batches"]) for v in batch.values()))]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for piece in pieces:
            loss = model(**piece).loss
            (loss / len(pieces)).backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        return sum(losses) / len(losses)

    return step, {"version": torch.__version__}


if __name__ == "__main__":
    import children

    children.serve(prepare)
