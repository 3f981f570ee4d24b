"""The machines, programs and counting rules of Fuyou's evaluation (2024, section 5).

Rates of whole blocks are the paper's own (its footnote 3 measures a transformer block); all else is the preset's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graph.blocks import Block
from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...passes.decisions import Activations
from ..lab import SimulatedStep
from .equations import Rates

PRECISION = "bf16"  # bytes and rates of fp16 without its loss scale, of which the paper says nothing
BLOCK_FLOPS = {"A100": 172e12 / 0.86, "4090": 87e12 / 0.53}  # section 1: throughput over its share of a block's rate
MOST_PIECES = 8  # of a batch inside a stage
# bytes/s at which DeepSpeed moves checkpoints through pageable memory (section 5.5), which it allocates as it goes.
# Fitted once, to the 28% of its step in which ZeRO-Infinity's GPU is busy at batch 32 (figure 1).
PAGEABLE = 1.4e9
DEEPSPEED_FITTED = {"fig1: 13B, A100, batch 32, GPU busy": "the rate of pageable memory under DeepSpeed"}
FREE_BANDWIDTH = 1e18  # bytes/s of device memory: its traffic is a part of the block's measured rate
STAGES = (
    "drop-masks, chunk-loss, interleave-forwards, coarsen, partition-min-stage{inputs_leave=true}, map-round-robin, "
    "schedule-pipeline"
)


def pipeline(
    choose: str = "", fetch: str = "", ssd: str | None = "tier=all", update: str = "", stages: str = STAGES
) -> str:
    """The passes of Fuyou with options for choose-activations, insert-fetch, insert-ssd and overlap-optimizer. With
    `ssd=None` weights and states are in DRAM."""

    def named(name: str, *options: str) -> str:
        given = ", ".join(option for option in options if option)
        return f"{name}{{{given}}}" if given else name

    tier = "" if ssd is None else ssd.partition(",")[0]
    parts = [stages, named("choose-activations", "swap=true", tier, choose), named("insert-fetch", "swap=true", fetch)]
    parts += [] if ssd is None else [named("insert-ssd", ssd)]
    return ", ".join([*parts, named("overlap-optimizer", update)])


FUYOU = pipeline()
APART = pipeline(update="overlap=false")  # Fuyou w/o overlapping
# Checkpoints go to DRAM and nothing else is kept. Weights are read and fetched when their block runs, and the optimizer
# runs after the backward.
ZERO_INFINITY = pipeline("to=dram, share=0", "prefetch=false", "tier=all, ahead=0", "overlap=false")
ZERO_OFFLOAD = pipeline("to=dram, share=0", "prefetch=false", None, "overlap=false")
COLOSSAL = pipeline("to=none", "prefetch=false", "tier=states", "overlap=false")  # checkpoints stay on the GPU


def machine(gpu: str, dram: str = "768GB", ssds: int = 12, block_rate: bool = True) -> Hardware:
    """The paper's server with one GPU ("A100", "4090"). With `block_rate` computation runs at the rate that the paper
    measured for a transformer block, else each call at the preset's rates."""
    hardware = Hardware.preset(f"fuyou-{gpu.lower()}")
    hardware = hardware.with_(dram=dram, ssds=ssds)
    if not block_rate:
        return hardware
    fraction = BLOCK_FLOPS[gpu] / hardware.devices[0].peak_flops["bf16"]
    return hardware.with_(achieved_fraction=fraction, memory_bandwidth=FREE_BANDWIDTH, op_overhead_s=0)


def lacks_device(trial: SimulatedStep) -> bool:
    """Whether the trial does not fit the GPU itself, so that more of another memory would not help."""
    return trial.misses_in in ("device", trial.hardware.devices[0].name)


def halvings(batch: int) -> Iterator[int]:
    """1, 2, 4, ... as long as they divide the batch, up to `MOST_PIECES`."""
    parts = 1
    while batch % parts == 0 and parts <= MOST_PIECES:
        yield parts
        parts *= 2


def repeated_blocks(blocks: Sequence[Block]) -> list[Block]:
    """The blocks with the most frequent hash: the transformer blocks."""
    hashes = [block.hash for block in blocks]
    most = max(hashes, key=hashes.count)
    return [block for block in blocks if block.hash == most]


def optimizer_share(trial: SimulatedStep) -> float:
    """The share of the step after the last computation; the GPU is idle in it."""
    assert trial.timeline is not None
    ended_s = max(span.end_s for span in trial.timeline.spans if span.stream == ops.COMPUTE)
    return 1 - ended_s / trial.timeline.step_s


def busy_share(trial: SimulatedStep) -> float:
    assert trial.timeline is not None
    return trial.timeline.busy_share[0, ops.COMPUTE]


def swap_coefficient(trial: SimulatedStep) -> float:
    """The share of the bytes of all saved tensors that is not recomputed."""
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
    """A machine whose host's rates `ssd` or `optimizer` are multiplied by a factor."""
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
