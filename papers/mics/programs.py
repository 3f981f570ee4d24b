"""The machines, programs and counting rules of MiCS's evaluation (VLDB 2022, section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.hardware import Hardware
from ...ir.program import WRITTEN_OUT, Program, infer_all, micro_batch_of, profile_memory
from ...runtime.simulate import CostModel, Timeline
from ...runtime.simulate.sharing import TasksUnderWay

GPUS = 8  # of a host
FEW_HOSTS = WRITTEN_OUT // GPUS + 1
FEW = 2  # the number of micro-batches of a lane that are simulated
V100, A100 = "mics-p3dn", "mics-p4d"
# What whole steps reach of what their calls and collectives reach alone, at which they are simulated: fitted once for
# each machine, to the 42% of a V100's peak that BERT 10B has (section 5.1.1), taken for 16 GPUs, and to the 179 TFLOPS
# of 52B on 128 A100 (section 5.1.5).
STEP_SHARES = {V100: 0.7075, A100: 0.7925}
STEP_FITTED = {
    "fig9: BERT 10B, 16 GPUs, MiCS, TFLOPS a GPU (42% of 125)": "what whole steps reach on p3dn",
    "huge: 52B, 128 GPUs, MiCS, TFLOPS a GPU": "what whole steps reach on p4d",
}
# The inputs of all stages are held for one micro-batch at a time, not for all micro-batches.
START = "coarsen, mesh{{shards={shards}}}, partition-min-stage{{inputs_leave=true}}, map-round-robin, schedule-1f1b, "


@dataclass(frozen=True)
class Form:
    """A way to train. `remat`, `shard` and `sums` are options of insert-remat, insert-shard and insert-two-hop."""

    name: str
    remat: str = "always=true"
    shard: str = "tier=device, hold=false"
    sums: str = "every=two-hop"

    def line(self, shards: int) -> str:
        named = (("insert-remat", self.remat), ("insert-shard", self.shard), ("insert-two-hop", self.sums))
        parts = [f"{name}{{{options}}}" if options else name for name, options in named]
        return START.format(shards=shards) + ", ".join([*parts, "insert-optimizer"])


MICS = Form("MiCS")
FLAT = Form("MiCS, plain gathers", shard="tier=device, hold=false, hierarchical=false")
ONE_HOP = Form("MiCS, sums with every micro-batch", sums="every=micro-batch")
ZERO3 = Form("MiCS (ZeRO-3)", shard="tier=device, hold=false, hierarchical=false")
DEEPSPEED = Form("DeepSpeed", shard="tier=device, hold=false, hierarchical=false, prefetch=0")
ZERO2 = Form("ZeRO-2", shard="tier=device, hold=true, hierarchical=false")
OURS = Form("ours", remat="", shard="tier=device, prefetch=8", sums="")
RIVALS = ((MICS, None), (DEEPSPEED, 0), (ZERO3, 0))  # with the number of shards: the model's own (None), all GPUs (0)
NO_REMAT = replace(MICS, remat=""), replace(DEEPSPEED, remat=""), replace(ZERO3, remat="")


def hardware(kind: str, hosts: int) -> Hardware:
    return Hardware.preset(f"{kind}:{hosts}")


def with_factors(machine: Hardware, bandwidth: float = 1.0, latency: float = 1.0, memory: float = 1.0) -> Hardware:
    """The machine with a network of `bandwidth` times its rate, `latency` times the time to begin a transfer between
    hosts, and GPUs of `memory` times their size."""
    if (bandwidth, latency, memory) == (1.0, 1.0, 1.0) or machine.network is None:
        return machine
    network = machine.network.model_dump(exclude_defaults=True)
    network |= {"bandwidth": bandwidth * machine.network.bandwidth, "latency_s": latency * machine.network.latency_s}
    own: dict[str, Any] = {"memory": round(memory * machine.devices[0].memory_bytes),
           "link_latency_s": latency * machine.devices[0].link_latency_s}  # fmt: skip
    return machine.with_(network=network, **own)


def spread(programs: Sequence[Program], gpus: int, shards: int) -> list[Program]:
    """A lane's programs on a machine with `gpus` lanes of one device each, in groups of `shards` that share weights."""
    found = []
    for program in programs:
        changed = program.copy().with_interface(lanes=tuple((device,) for device in range(gpus)), shards=shards)
        infer_all(changed)
        found.append(changed)
    return found


def fits(programs: Sequence[Program], machine: Hardware) -> bool:
    """Whether the first devices' memories hold a lane's programs."""
    return all(profile_memory(p).peak_bytes[ops.DEVICE] <= machine.devices[p.device].budget_bytes for p in programs)


def period_s(programs: Sequence[Program], timeline: Timeline) -> float:
    """Seconds between the begins of the last two micro-batches of a lane; 0 if there is only one."""
    (first,) = programs
    nodes = [node for node in first.ops() if op_of(node).streams]
    begins: dict[int, float] = {}
    for node, span in zip(nodes, timeline.spans, strict=True):
        if node.target is ops.forward:
            begins.setdefault(micro_batch_of(node), span.start_s)
    ordered = sorted(begins.values())
    return ordered[-1] - ordered[-2] if len(ordered) > 1 else 0.0


def collective_s(
    machine: Hardware, members: Sequence[int], num_bytes: float, times: int = 1, hierarchical: bool = False
) -> float:
    """Seconds of one collective that has the machine to itself."""
    work = ops.Work(
        ops.COMM, moved_bytes=round(num_bytes), source=ops.DEVICE, target=ops.DEVICE, group="all", rounds=times,
        hierarchical=hierarchical,
    )  # fmt: skip
    model = CostModel(machine, "fp16")
    progress = TasksUnderWay(model.links)
    progress.begin(0, model.collective([(device, work) for device in members]), 0.0)
    end_s = 0.0
    while progress.events:
        now_s, over = progress.pop()
        end_s = now_s if over is not None else end_s
    return end_s


def effective(machine: Hardware, members: Sequence[int], num_bytes: float) -> float:
    """Bytes/s of a plain gather as section 3.1 defines it: the bytes that a member gets from others, over the time."""
    share = (len(members) - 1) / len(members)
    return share * num_bytes / collective_s(machine, members, num_bytes)
