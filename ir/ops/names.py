"""Names that ops share: of streams, of memories, and of groups of devices."""

from __future__ import annotations

from typing import Final

__all__ = [
    "COMM", "COMPUTE", "CPU", "D2H", "DEVICE", "DRAM", "H2D", "HOST", "MEMORIES", "MESH_GROUPS", "READ", "RECV",
    "REPLICAS", "SEND", "SHARDS", "SSD", "STREAMS", "WRITE",
]  # fmt: skip

HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU = "host", "compute", "h2d", "d2h", "send", "recv", "comm", "cpu"
READ, WRITE = "read", "write"  # of SSDs
STREAMS = (HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU, READ, WRITE)
# The memories that a program names: each device has its own, DRAM and SSDs are its host's.
DEVICE: Final = "device"
DRAM: Final = "dram"
SSD: Final = "ssd"
MEMORIES = (DEVICE, DRAM, SSD)
# Groups of devices in several lanes: those that share a stage's weights, and those that have the same of them.
SHARDS, REPLICAS = "shards", "replicas"
MESH_GROUPS = (SHARDS, REPLICAS)
