"""Names that ops share: of streams, of memories, of groups of devices, and what their traits name."""

from __future__ import annotations

__all__ = [
    "ASYNCHRONOUS", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "COMM", "COMPUTE", "CPU", "D2H", "DEVICE", "DRAM", "EVALUATE",
    "EVALUATION", "EVERYWHERE", "FORWARD", "GROUP", "H2D", "HOST", "MEMORIES", "MESH_GROUPS", "PEER", "READ", "RECV",
    "REPLICAS", "SEND", "SHARDS", "SSD", "STEP", "STREAMS", "TRAINING", "WRITE",
]  # fmt: skip

HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU = "host", "compute", "h2d", "d2h", "send", "recv", "comm", "cpu"
READ, WRITE = "read", "write"  # of SSDs
STREAMS = (HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU, READ, WRITE)
# The memories that a program names: each device has its own, DRAM and SSDs are its host's.
DEVICE, DRAM, SSD = "device", "dram", "ssd"
MEMORIES = (DEVICE, DRAM, SSD)
# Groups of devices in several lanes: those that share a stage's weights, and those that have the same of them.
SHARDS, REPLICAS = "shards", "replicas"
MESH_GROUPS = (SHARDS, REPLICAS)
# The functions of a file; an asynchronous step may hold more than another.
STEP, ASYNCHRONOUS, EVALUATE = "step", "asynchronous step", "evaluate"
TRAINING, EVALUATION = (STEP, ASYNCHRONOUS), (EVALUATE,)
EVERYWHERE = (*TRAINING, *EVALUATION)
# The parts of a stage's work on one micro-batch in training; a backward is two.
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward_input", "backward_weight"
# Whom a call waits for on other devices.
PEER, GROUP = "peer", "group"
