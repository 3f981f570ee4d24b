"""One rank of a training by FSDP2 on CPUs, to compare with: `python fsdp2_rank.py RANK WORLD FOLDER`.

Reads `given.pt` (the weights, the batches, the number of micro-batches of each rank), writes `losses and weights` to
`found.pt`. Every layer and the whole model are wrapped, parameters are bf16, and sums of gradients fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from penstock.tests.compiler.plain_precision import Upcasts


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    given = torch.load(folder / "given.pt")
    model = Upcasts()
    model.load_state_dict(given["weights"])
    mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=given["lr"])
    losses, count = [], given["micro_batches"]
    for batch in given["batches"]:
        own = {name: value.chunk(world)[rank] for name, value in batch.items()}
        total = 0.0
        for m in range(count):
            model.set_requires_gradient_sync(m == count - 1)
            loss = model(**{name: value.chunk(count)[m] for name, value in own.items()})["loss"] / count
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        losses.append(float(mean) / world)
    weights = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    if rank == 0:
        torch.save({"losses": losses, "weights": {n: w.detach() for n, w in weights.items()}}, folder / "found.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
