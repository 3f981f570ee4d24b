"""Measuring the memory of a GPU that communicators of NCCL take, outside of torch's allocator.

They take some when they are made, more with the first message to and from each peer, and more with the first gather and
the first sum, as `ir/program/communicators.py` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...ir.program import MESSAGE_BLOCKS, Seats
from ..device.exchange import gather_rows, sum_rows
from ..device.peers import nccl_communicator
from .cpu import MIB

MESSAGES, MESSAGE = "for messages, at rest", "the first message"
GROUP, GATHER, SUMS = "of a group, at rest", "its first gather", "its sums, after a gather"
STEPS = (MESSAGES, MESSAGE, GROUP, GATHER, SUMS)
ROW_BYTES = 4 * MIB  # of each member: NCCL has other algorithms for few bytes


def communicator_bytes(store: dist.Store, rank: int, count: int, device: torch.device) -> dict[str, int]:
    """The bytes of this GPU that two communicators of `count` GPUs take, one for messages and one for a group, in the
    order in which they come; the process of each of the GPUs must call it. The first communicator of a process also
    loads NCCL's kernels. The first message is from rank 0 to rank 1: other ranks have nothing of it.
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

    messages = measure(MESSAGES, lambda: make("messages", MESSAGE_BLOCKS))
    if rank < 2:
        begin = messages.recv if rank else messages.send
        measure(MESSAGE, lambda: begin([spare], 1 - rank, 0).wait())
    group, seats = measure(GROUP, lambda: make("group")), Seats(rank, tuple(range(count)), ())

    def sums() -> None:
        sum_rows(group, rows, spare, None, seats)
        group.allreduce([rows], dist.AllreduceOptions()).wait()

    measure(GATHER, lambda: gather_rows(group, seats, rows, hierarchical=False))
    measure(SUMS, sums)
    return found
