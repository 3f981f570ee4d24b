"""The common part of all papers' reproductions: a setup with a lab, sizes of models, texts of assumptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache
from typing import Any, Self

from ..compiler.models.named import find_model
from ..graph.blocks import Block
from ..ir.machine.hardware import Device, Hardware
from ..ir.machine.part import Dtype
from ..ir.machine.rates import RateCurve
from ..passes.rewrite.coarsen import Coarsen
from .lab import Lab, ModelSource, Workload, num_params
from .table import FigureTable

LAYERS, OPERATORS = "coarsen", "coarsen{level=operator}"


class Experiments:
    """A paper's experiments. Class attributes are the paper's own setup; a subclass may make a smaller one."""

    title: str
    left_out: Mapping[str, str] = {}  # figure -> why it is not simulated
    factors: Mapping[str, str] = {}  # what stands for the paper's framework -> what it is
    models: Mapping[str, Any]  # by the paper's names
    precision = "fp16"
    state_bytes = 8.0  # of the optimizer, per parameter
    sequence = 512
    presets: Sequence[str] = ()  # the machines, without what an experiment changes of them
    changes: Mapping[str, Any] = {}  # of the machines, see `on`
    unnamed: Mapping[str, ModelSource] = {}  # models that `compiler/models` does not name

    def __init__(self, lab: Lab | None = None):
        self.lab = lab or Lab()
        self.lab.models |= self.unnamed

    def on(self, **changes: Any) -> Self:
        """The same experiments on machines that `changes` alter, see `Hardware.with_`; trials are shared."""
        other = copy(self)
        other.changes = {**self.changes, **changes}
        return other

    def assumptions(self) -> dict[str, str]:
        """The assumptions of all figures, taken from the machines and the setup that are simulated."""
        raise NotImplementedError

    def small(self) -> Iterator[tuple[str, Workload, Hardware, str]]:
        """Small steps that notice when passes or simulator give other figures: a name, and what a trial takes."""
        raise NotImplementedError

    def workload(
        self, model: str, rows: int, micro_batches: int, sequence: int | None = None, targets: int | None = None
    ) -> Workload:
        """Micro-batches of `rows` rows of one of our models, at the paper's precision."""
        length = sequence or self.sequence
        return Workload(model, rows, micro_batches, length, targets, self.precision, self.state_bytes)

    def blocks(self, workload: Workload, hardware: Hardware, level: str = LAYERS) -> list[Block]:
        coarsen = Coarsen(level="operator") if level == OPERATORS else Coarsen()
        return self.lab.draft(workload, hardware, coarsen).blocks


@lru_cache
def billions(name: str) -> float:
    """The number of parameters of one of our models, in billions."""
    return num_params(find_model(name).on_meta()) / 1e9


def sizes_table(models: Mapping[str, str], claims: Mapping[str, float]) -> FigureTable:
    """A table of parameters. `models` maps the paper's names to ours, `claims` to the paper's numbers in billions."""
    table = FigureTable()
    for model, name in models.items():
        own = "the model's own dimensions"
        table.add(model, "parameters", billions(name), " B", claim=claims.get(model), apart=own)
    return table


def step_flops(batch: int, sequence: int, layers: int, hidden: int, vocabulary: int) -> float:
    """FLOPs of a step, 96 b s l h^2 (1 + s / 6h + V / 16lh) (Narayanan et al. 2021), which counts recomputation."""
    whole = 96.0 * batch * sequence * layers * hidden**2
    return whole * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))


def at_share(hardware: Hardware, share: float) -> Hardware:
    """The machine with GPUs that take 1 / `share` of their time for every call, as a paper's framework does."""
    device = hardware.devices[0]
    assert device.rates is not None
    return hardware.with_(
        memory_bandwidth=share * device.memory_bandwidth, op_overhead_s=device.op_overhead_s / share,
        rates=device.rates.scaled(share).model_dump(),
    )  # fmt: skip


def said_memory(device: Device) -> str:
    return f"{device.memory_bytes / 2**30:.0f} GiB, {device.usable_fraction:.0%} of it usable"


def said_products(device: Device, dtype: Dtype) -> str:
    """A text that says how fast matrix products and attention are."""
    assert device.rates is not None
    sizes = ", ".join(f"{rate / 1e12:.0f} at {size:.0f}" for size, rate in device.rates.products[dtype])
    return (
        f"matrix products in {dtype} by size as publicly measured ({sizes}; TFLOPS, of "
        f"{device.peak_flops[dtype] / 1e12:.0f}), attention by its length; sources in docs/rates.md"
    )


def said_traffic(device: Device) -> str:
    """A text that says what a call costs besides its matrix products."""
    assert device.rates is not None and device.rates.pointwise is not None
    return (
        f"other calls' traffic at {device.rates.pointwise[-1][1] / 1e9:.0f} GB/s, plus "
        f"{device.op_overhead_s * 1e6:.0f} us a call"
    )


def said_shares(curve: RateCurve | None, text: Callable[[float], str]) -> str:
    """A text that says what share of a rate is reached at which size."""
    return ", ".join(f"{share:.1%} at {text(size)}" for size, share in curve or ())
