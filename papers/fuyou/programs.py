"""The machines, programs and counting rules of Fuyou's evaluation (2024, section 5).

Rates of whole blocks are the paper's own (its footnote 3 measures a transformer block); everything else is the preset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...passes.decisions import Activations
from ...passes.graph.blocks import Block
from ..lab import SimulatedStep
from .equations import Rates

PRECISION = "bf16"  # bytes and rates of fp16 without its loss scale, of which the paper says nothing
BLOCK_FLOPS = {"A100": 172e12 / 0.86, "4090": 87e12 / 0.53}  # section 1: so much is so large a part of a block's rate
MOST_PIECES = 8  # of a batch inside a stage
FREE_BANDWIDTH = 1e18  # bytes/s of device memory: its traffic is a part of the block's measured rate
STAGES = "coarsen, partition-min-stage{inputs_leave=true}, map-round-robin, schedule-pipeline"


def pipeline(
    choose: str = "", fetch: str = "", ssd: str | None = "tier=all", update: str = "", stages: str = STAGES
) -> str:
    """The passes of Fuyou with options for choose-activations, insert-fetch, insert-ssd and overlap-optimizer;
    `ssd=None`: weights and states in DRAM."""

    def named(name: str, *options: str) -> str:
        given = ", ".join(option for option in options if option)
        return f"{name}{{{given}}}" if given else name

    tier = "" if ssd is None else ssd.partition(",")[0]
    parts = [stages, named("choose-activations", "swap=true", tier, choose), named("insert-fetch", "swap=true", fetch)]
    parts += [] if ssd is None else [named("insert-ssd", ssd)]
    return ", ".join([*parts, named("overlap-optimizer", update)])


FUYOU = pipeline()
APART = pipeline(update="overlap=false")  # Fuyou w/o overlapping
# Checkpoints go to DRAM and nothing else is kept; weights are read and fetched when their block is due, and the
# optimizer runs after the backward.
ZERO_INFINITY = pipeline("to=dram, share=0", "prefetch=false", "tier=all, ahead=0", "overlap=false")
ZERO_OFFLOAD = pipeline("to=dram, share=0", "prefetch=false", None, "overlap=false")
COLOSSAL = pipeline("to=none", "prefetch=false", "tier=states", "overlap=false")  # checkpoints stay on the GPU


def machine(gpu: str, dram: str = "768GB", ssds: int = 12, block_rate: bool = True) -> Hardware:
    """The paper's server with one GPU ("A100", "4090"). With `block_rate` computation runs at what the paper measured
    of a transformer block, else at the preset's rates for each call."""
    hardware = Hardware.preset(f"fuyou-{gpu.lower()}")
    hardware = hardware.with_(dram=dram, ssds=ssds)
    if not block_rate:
        return hardware
    fraction = BLOCK_FLOPS[gpu] / hardware.devices[0].peak_flops["bf16"]
    return hardware.with_(achieved_fraction=fraction, memory_bandwidth=FREE_BANDWIDTH, op_overhead_s=0)


def lacks_device(trial: SimulatedStep) -> bool:
    """Does it miss room on the GPU, of which no other memory could give more?"""
    return trial.misses_in in ("device", trial.hardware.devices[0].name)


def halvings(batch: int) -> Iterator[int]:
    """1, 2, 4, ... as long as they divide the batch, up to `MOST_PIECES`."""
    parts = 1
    while batch % parts == 0 and parts <= MOST_PIECES:
        yield parts
        parts *= 2


def repeated_blocks(blocks: Sequence[Block]) -> list[Block]:
    """Those of the hash that most blocks have: the transformer blocks."""
    hashes = [block.hash for block in blocks]
    most = max(hashes, key=hashes.count)
    return [block for block in blocks if block.hash == most]


def optimizer_share(trial: SimulatedStep) -> float:
    """Share of the step after the last computation, in which the GPU is idle."""
    assert trial.timeline is not None
    ended_s = max(span.end_s for span in trial.timeline.spans if span.stream == ops.COMPUTE)
    return 1 - ended_s / trial.timeline.step_s


def busy_share(trial: SimulatedStep) -> float:
    assert trial.timeline is not None
    return trial.timeline.busy_share[0, ops.COMPUTE]


def swap_coefficient(trial: SimulatedStep) -> float:
    """Of the bytes of all classes of saved tensors, the share that is not computed again."""
    again, moved = trial.decisions["rematerialise"], trial.decisions["activations"]
    kept = whole = 0
    for spec in trial.specs:
        names = [saved.name for saved in spec.saved]
        chosen = moved.get(spec.name, Activations()).classes if spec.name in again else names
        whole += sum(saved.bytes for saved in spec.saved)
        kept += sum(saved.bytes for saved in spec.saved if saved.name in chosen)
    return kept / whole


def rates(hardware: Hardware) -> Rates:
    return Rates.of(hardware, PRECISION)


def with_rates(hardware: Hardware, **factors: float) -> Hardware:
    """A machine with some rates of its host times a factor: `ssd`, `optimizer`."""
    host = hardware.hosts[0]
    if factor := factors.get("ssd"):
        disks = [
            {"size_bytes": d.size_bytes, "read_bandwidth": factor * d.read_bandwidth,
             "write_bandwidth": factor * d.write_bandwidth} for d in host.ssds
        ]  # fmt: skip
        hardware = hardware.with_(ssds=disks)
    if factor := factors.get("optimizer"):
        hardware = hardware.with_(optimizer_params_per_s=factor * host.optimizer_params_per_s)
    return hardware
