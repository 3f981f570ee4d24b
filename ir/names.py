"""Names that ops and stages share: streams, memories, groups of devices, and the values of their traits; and how the
names of a user's model are read."""

from __future__ import annotations

import unicodedata
from typing import Final

__all__ = [
    "ASYNCHRONOUS", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "COMM", "COMPUTE", "CPU", "D2H", "DEVICE", "DRAM", "EVALUATE",
    "EVALUATION", "EVERYWHERE", "FORWARD", "GROUP", "H2D", "HOST", "LANE_GROUPS", "MEMORIES", "MESH_GROUPS", "PAIRS",
    "PEER", "READ", "RECV", "REPLICAS", "RING_STEP", "SEND", "SHARDS", "SSD", "STEP", "STREAMS", "TEAM", "TEAM_OPS",
    "TRAINING", "WRITE", "identifier", "is_index",
]  # fmt: skip

HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU = "host", "compute", "h2d", "d2h", "send", "recv", "comm", "cpu"
READ, WRITE = "read", "write"  # of SSDs
STREAMS = (HOST, COMPUTE, H2D, D2H, SEND, RECV, COMM, CPU, READ, WRITE)
# The memories that a program names: each device has its own, DRAM and SSDs are its host's.
DEVICE: Final = "device"
DRAM: Final = "dram"
SSD: Final = "ssd"
MEMORIES = (DEVICE, DRAM, SSD)
# Groups over lanes: the devices that hold the shards of one stage, and the devices that hold the same shard of it.
SHARDS, REPLICAS = "shards", "replicas"
MESH_GROUPS = (SHARDS, REPLICAS)
TEAM = "team"  # the devices that run the same micro-batches together, each a part of the work inside a layer
LANE_GROUPS = (*MESH_GROUPS, TEAM)
TEAM_OPS = (  # by which the members of a team exchange values inside a layer: the ops of `ops/team.py`
    "all_to_all", "from_experts", "gather_parts", "member", "own_part", "pass_on", "scatter_sum", "sum_parts",
    "to_experts",
)  # fmt: skip
# Who sends to whom in a collective that goes round no ring: each member to each other one, or to the next one alone.
PAIRS, RING_STEP = "pairs", "ring step"
# The functions of a file; an asynchronous step may hold more ops than another step.
STEP, ASYNCHRONOUS, EVALUATE = "step", "asynchronous step", "evaluate"
TRAINING, EVALUATION = (STEP, ASYNCHRONOUS), (EVALUATE,)
EVERYWHERE = (*TRAINING, *EVALUATION)
# The parts of a stage's work on one micro-batch in training; a backward has two.
FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "forward", "backward_input", "backward_weight"
# Which other devices a call waits for.
PEER, GROUP = "peer", "group"


def is_index(part: str) -> bool:
    """Whether a part of a dotted name is a number as Python writes it: the place of a module in a list."""
    return part.isascii() and part.isdecimal() and str(int(part)) == part


def identifier(text: str) -> str:
    """The text with "_" for each character that no Python name has; Python reads names in their compatible form."""
    return "".join(c if f"_{c}".isidentifier() else "_" for c in unicodedata.normalize("NFKC", text))
