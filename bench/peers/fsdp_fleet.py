"""FSDP2 over four ranks of two hosts, sharded over all (ZeRO-3) or inside a host with replicas across (HSDP).

Run by torchrun, see `ranks`. Gradients are accumulated over a rank's micro-batches. Each way in which FSDP2 can spare a
slow link is a side of its own; the comparison is with the fastest:

- `full shard`: weights are gathered for each forward and again for each backward, gradients scattered after each.
- `full shard, gradients at the end`: gradients are scattered once a step, and kept whole until then.
- `full shard, whole in a step`: also, weights are gathered once a step; every rank holds the whole model meanwhile.
- `full shard, whole in a step, ahead`: also, all gathers begin with the step, so that they run during the forward.
- `hsdp`: as full shard inside a host; across hosts gradients are summed at the last micro-batch only.
- `hsdp, gradients at the end` and so on: as above.

On a CPU all other collectives of FSDP2 block, as it has no other stream there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from penstock.bench.peers import models
from penstock.bench.peers.ranks import serve

FULL, HSDP = "full shard", "hsdp"
KINDS = ("", ", gradients at the end", ", whole in a step", ", whole in a step, ahead")
SIDES = tuple(shape + kind for shape in (FULL, HSDP) for kind in KINDS)


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, per_host = dist.get_world_size(), dist.get_world_size() // 2
    meshes = {
        FULL: dist.device_mesh.init_device_mesh("cpu", (ranks,)),
        HSDP: dist.device_mesh.init_device_mesh("cpu", (2, per_host), mesh_dim_names=("replicas", "shards")),
    }
    pieces = own_pieces(settings, dist.get_rank(), ranks)
    sides: dict[str, Callable[[], float]] = {}
    for shape, kind in ((shape, kind) for shape in meshes for kind in KINDS):
        if shape + kind in settings["sides"]:
            sides[shape + kind] = side(settings, meshes[shape], kind, pieces)
    serve(sides, settings["socket"], {"version": torch.__version__})
    dist.destroy_process_group()


def own_pieces(settings: dict[str, Any], rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches: an equal share of the global batch, in order."""
    batch = models.batch(settings["batch"], vocabulary=settings["vocabulary"])
    total = settings["micro_batches"]
    pieces = [dict(zip(batch, parts)) for parts in zip(*(v.chunk(total) for v in batch.values()))]
    share = total // ranks
    return pieces[rank * share : (rank + 1) * share]


def side(settings: dict[str, Any], mesh: Any, kind: str, pieces: list[dict[str, Tensor]]) -> Callable[[], float]:
    """A function that trains, by one step, a new model that is sharded over the mesh."""
    model = models.gpt2(settings["layers"], settings["width"], settings["tied"], settings["vocabulary"]).train()
    whole = kind in KINDS[2:]
    for part in (*model.transformer.h, model):  # type: ignore[union-attr]
        fully_shard(part, mesh=mesh, reshard_after_forward=not whole)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"], fused=True)
    return partial(step, model, optimizer, pieces, kind=kind)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, pieces: list[dict[str, Tensor]], kind: str
) -> float:  # fmt: skip
    assert isinstance(model, FSDPModule)
    losses = []
    optimizer.zero_grad(set_to_none=True)
    if kind == KINDS[3]:
        for part in (model, *model.transformer.h):  # type: ignore[union-attr]
            part.unshard(async_op=True)  # type: ignore[union-attr]
    for piece in pieces:
        last = piece is pieces[-1]
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last or kind == KINDS[0])
        model.set_requires_all_reduce(last)  # the line above sets it too
        model.set_reshard_after_backward(last or kind not in KINDS[2:])
        loss = model(**piece).loss
        (loss / len(pieces)).backward()
        losses.append(loss.detach())
    optimizer.step()
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
