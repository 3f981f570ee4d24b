"""Measuring the memory of a GPU that communicators of NCCL take, outside of torch's allocator.

They take some when they are made, more with the first message to and from each peer, and more with the first gather and
the first sum, as `ir/program/communicators.py` counts.

Run as `python -m penstock.runtime.measure.communicators RANK COUNT PATH`, once for each GPU, with a file that does not
exist yet. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...ir.program import MESSAGE_BLOCKS, Seats
from ..device.exchange import gather_rows, sum_rows
from ..device.peers import nccl_communicator
from .cpu import MIB

ROW_BYTES = 4 * MIB  # of each member: NCCL has other algorithms for few bytes


def communicator_bytes(store: dist.Store, rank: int, count: int, device: torch.device) -> dict[str, int]:
    """The bytes of this GPU that two communicators of `count` GPUs take; the process of each of the GPUs must call it.

    `first`: one for messages, before it is used, with NCCL's kernels if it is the first of this process. `message`: the
    connection of its first message, from rank 0 to rank 1, of which other ranks have nothing. `rest`: one of a group,
    before it is used. `gather`: the connections of its first gather. `sums`: those of its first sums, after the gather.
    """
    rows = torch.zeros(count, ROW_BYTES // 4, device=device)
    spare, found = torch.zeros_like(rows[0]), dict[str, int]()

    def measure(name: str, work: Callable[[], Any]) -> Any:
        torch.cuda.synchronize(device)
        free_bytes = torch.cuda.mem_get_info(device)[0]
        result = work()
        torch.cuda.synchronize(device)
        found[name] = free_bytes - torch.cuda.mem_get_info(device)[0]
        return result

    def make(name: str, most_blocks: int | None = None) -> Any:
        return nccl_communicator(dist.PrefixStore(name, store), rank, count, device, most_blocks)

    messages = measure("first", lambda: make("messages", MESSAGE_BLOCKS))
    if rank < 2:
        begin = messages.recv if rank else messages.send
        measure("message", lambda: begin([spare], 1 - rank, 0).wait())
    group, seats = measure("rest", lambda: make("group")), Seats(rank, tuple(range(count)), ())

    def sums() -> None:
        sum_rows(group, rows, spare, None, seats)
        group.allreduce([rows], dist.AllreduceOptions()).wait()

    measure("gather", lambda: gather_rows(group, seats, rows, hierarchical=False))
    measure("sums", sums)
    return found


def main(rank: str, count: str, path: str) -> None:
    device = torch.device("cuda", int(rank))
    torch.cuda.set_device(device)
    print(json.dumps(communicator_bytes(dist.FileStore(path, int(count)), int(rank), int(count), device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
