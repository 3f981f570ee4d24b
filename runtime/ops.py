"""The instruction set: every op by its name. What an op is: see `op.py`."""

from __future__ import annotations

from .op import (
    COMM,
    COMPUTE,
    CPU,
    D2H,
    DEVICE,
    DRAM,
    H2D,
    HOST,
    MEMORIES,
    MESH_GROUPS,
    READ,
    RECV,
    REPLICAS,
    SEND,
    SHARDS,
    SSD,
    STREAMS,
    WRITE,
    Context,
    Op,
    Value,
    Work,
)  # fmt: skip
from .op_compute import add, aligned_class, backward, evaluate, forward
from .op_devices import all_gather, all_reduce, recv, reduce_scatter, send
from .op_split import backward_input, backward_weight
from .op_transfers import fetch, free, load, offload, read, resident, write
from .op_update import clip, norm, redo, step
from .op_versions import predict, split, stash

ALL: dict[str, Op] = {
    op.name: op
    for op in (
        load, resident, read, fetch, offload, write, free, forward, evaluate, backward, backward_input,
        backward_weight, add, send, recv, all_gather, reduce_scatter, all_reduce, norm, clip, step, redo,
        split, stash, predict,
    )
}  # fmt: skip

__all__ = [
    "ALL", "COMM", "COMPUTE", "CPU", "D2H", "DEVICE", "DRAM", "H2D", "HOST", "MEMORIES", "MESH_GROUPS", "READ", "RECV",
    "REPLICAS", "SEND", "SHARDS", "SSD", "STREAMS", "WRITE", "Context", "Op", "Value", "Work", "aligned_class", *ALL,
]  # fmt: skip
