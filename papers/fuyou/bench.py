"""The machines, programs and counting rules of Fuyou's evaluation (2024, section 5) for `reproduce_fuyou`.

Rates of whole blocks are the paper's own (its footnote 3 measures a transformer block); everything else is the preset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...compiler.models.named import find_model
from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...passes.decisions import Activations
from ...passes.graph.blocks import Block
from ...passes.graph.coarsen import Coarsen
from ..lab import Case, Lab, Trial, num_params
from .equations import Load, Rates, Swappable

PRECISION = "bf16"  # bytes and rates of fp16 without its loss scale, of which the paper says nothing
BLOCK_FLOPS = {"A100": 172e12 / 0.86, "4090": 87e12 / 0.53}  # section 1: so much is so large a part of a block's rate
MOST_PIECES = 8  # of a batch inside a stage
FREE_BANDWIDTH = 1e18  # bytes/s of device memory: its traffic is a part of the block's measured rate
STAGES = "coarsen, partition-min-stage{inputs_leave=true}, map-round-robin, schedule-pipeline"


@dataclass(frozen=True)
class Setup:
    """Models by the paper's names: our names. Batches are rows of one step."""

    models: Mapping[str, str]
    small: str  # of figures 5b to 9
    large: str  # of figures 5a and 10
    larger: Sequence[str]  # of figure 6
    batches: Mapping[tuple[str, str], Sequence[int]]  # (model, GPU) -> of figure 5
    overlapped: Mapping[str, Mapping[int, float]]  # figure 7: model -> batch -> the paper's gain
    pipelined: Mapping[str, Mapping[int, float]]  # figure 8: GPU -> batch -> the paper's gain
    swapped: Mapping[int, bool]  # figure 9: batch -> is the best swap coefficient positive?
    priced: Mapping[str, int]  # figure 10: GPU -> batch
    drams: Sequence[str] = ("128GB", "256GB", "384GB", "512GB", "640GB", "768GB")
    shares: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
    ssds: Sequence[int] = (1, 3, 6, 9, 12)
    extreme_batch: int = 64
    sequence: int = 1024
    gpus: Sequence[str] = ("A100", "4090")


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
# optimizer runs behind the backward.
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


@dataclass(frozen=True)
class Bench:
    """Trials of one setup."""

    lab: Lab
    setup: Setup

    def trial(self, model: str, batch: int, hardware: Hardware, line: str = FUYOU) -> Trial:
        """The batch in one piece where the GPU holds it, else cut inside each stage into as few equal parts as fit:
        weights move once a step either way."""
        name = self.setup.models[model]
        too_large = self.rows_too_large(name, hardware, line)
        pieces = list(halvings(batch))
        for parts in pieces:
            if batch // parts >= too_large and 2 * parts in pieces:
                continue
            case = Case(name, batch // parts, parts, self.setup.sequence, precision=PRECISION)
            found = self.lab.trial(case, hardware, line)
            if not lacks_device(found):
                break
        return found

    def rows_too_large(self, name: str, hardware: Hardware, line: str) -> float:
        """The fewest rows of a micro-batch for which the same GPU lacked room under the same passes."""
        tried = self.lab.trials.items()
        rows = (t.case.micro_batch for (_, _, text), t in tried if text == line and t.case.model == name
                and t.hardware.devices == hardware.devices and lacks_device(t))  # fmt: skip
        return min(rows, default=float("inf"))

    def flops(self, model: str, batch: int) -> float:
        """Of a step as the paper must count them: see `step_flops`."""
        config = find_model(self.setup.models[model]).config
        return step_flops(batch, self.setup.sequence, config.n_layer, config.n_embd, config.vocab_size)

    def tflops(self, trial: Trial) -> float | None:
        model = next(name for name, ours in self.setup.models.items() if ours == trial.case.model)
        batch = trial.case.micro_batch * trial.case.micro_batches
        return self.flops(model, batch) / trial.step_s / 1e12 if trial.step_s else None

    def load(self, trial: Trial) -> Load:
        """What the equations ask of the trial's model and batch, from its blocks."""
        case = trial.case
        blocks = self.lab.draft(case, trial.hardware, Coarsen()).blocks
        repeated = repeated_blocks(blocks)
        boundary = sum(v.numel() * v.element_size() for b in repeated for v in (b.outputs[0].meta["val"],))
        return Load(
            trial.params,
            case.micro_batches * sum(block.cost.forward_flops for block in blocks),
            case.micro_batches * boundary,
            [
                Swappable(case.micro_batches * call.bytes, case.micro_batches * call.flops)
                for block in repeated
                for call in block.cost.calls or ()
            ],
        )


def lacks_device(trial: Trial) -> bool:
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


def step_flops(batch: int, sequence: int, layers: int, hidden: int, vocabulary: int) -> float:
    """96 b s l h^2 (1 + s / 6h + V / 16lh) of Narayanan et al. 2021, which counts the recomputation of every block."""
    whole = 96.0 * batch * sequence * layers * hidden**2
    return whole * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))


def optimizer_share(trial: Trial) -> float:
    """Share of the step behind the last computation, in which the GPU is idle."""
    assert trial.timeline is not None
    ended_s = max(span.end_s for span in trial.timeline.spans if span.stream == ops.COMPUTE)
    return 1 - ended_s / trial.timeline.step_s


def busy_share(trial: Trial) -> float:
    assert trial.timeline is not None
    return trial.timeline.busy_share[0, ops.COMPUTE]


def swap_coefficient(trial: Trial) -> float:
    """Of the bytes of all classes of saved tensors, the share that is not computed again."""
    again, moved = trial.decisions["rematerialise"], trial.decisions["activations"]
    kept = whole = 0
    for spec in trial.specs:
        names = [saved.name for saved in spec.saved]
        chosen = moved.get(spec.name, Activations()).classes if spec.name in again else names
        whole += sum(saved.bytes for saved in spec.saved)
        kept += sum(saved.bytes for saved in spec.saved if saved.name in chosen)
    return kept / whole


@lru_cache
def billions(name: str) -> float:
    """Parameters of one of our models."""
    return num_params(find_model(name).on_meta()) / 1e9


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
