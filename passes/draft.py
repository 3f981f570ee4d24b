"""A compilation under way: what passes read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..ir.machine.hardware import Hardware
from ..ir.precision import PRECISIONS
from ..ir.program import Program

if TYPE_CHECKING:
    from .graph.blocks import Block
    from .graph.opgraph import OpGraph
    from .graph.stages import PlannedStage

# Measures blocks on the devices of the machine at hand: the same blocks, with seconds by device name.
Profiler = Callable[["OpGraph", list["Block"], Hardware], list["Block"]]
StateBytes = Callable[[str, tuple[int, ...]], int]  # of the optimizer, for a parameter by name and shape


class Lasting(NamedTuple):
    """Bytes that stay across steps, by what they are."""

    weights: int
    masters: int
    states: int


@dataclass(frozen=True)
class Options:
    """What the user asked for, besides model and hardware. Amounts are per global batch unless said otherwise."""

    micro_batches: int = 1
    precision: str = "fp32"
    max_grad_norm: float | None = None
    state_bytes_per_param: float = 8.0
    state_bytes_of: StateBytes | None = None  # where it depends on a parameter's shape
    profiler: Profiler | None = None  # None: times come from the roofline

    @property
    def optimizer_bytes_per_param(self) -> float:
        """What the optimizer keeps of one trained parameter: its master and its states."""
        return PRECISIONS[self.precision].master_bytes + self.state_bytes_per_param

    def lasting(self, weight_bytes: int, trained_params: int) -> Lasting:
        """What stays across steps. Lower bounds take it: a run rounds every part up a little (`bytes_of_homes`)."""
        masters = PRECISIONS[self.precision].master_bytes * trained_params
        return Lasting(weight_bytes, masters, int(self.state_bytes_per_param * trained_params))


@dataclass(frozen=True)
class Sharding:
    """How stages are spread over the lanes that share them.

    `tier`: the memory of the shards, "device", "dram", or "ssd" where `insert-ssd` moves them on; `ahead`: gathered so
    many phases before their use; `held`: stages that are gathered once and stay whole for all micro-batches;
    `hierarchical`: gathered between hosts first, then inside them.
    """

    tier: str = "dram"
    ahead: int = 1
    hierarchical: bool = False
    held: tuple[str, ...] = ()


@dataclass
class Draft:
    """A compilation under way. Fields fill from top to bottom; `programs` exist from the schedule on.

    With `lanes`, everything is about one of them: `hardware` is its part of the `whole` machine.
    """

    graph: OpGraph
    hardware: Hardware
    options: Options = field(default_factory=Options)
    blocks: list[Block] = field(default_factory=list)
    partition: list[list[str]] = field(default_factory=list)  # stage -> names of its blocks
    stages: list[PlannedStage] = field(default_factory=list)
    planned_for: list[int] = field(default_factory=list)  # stage -> the device whose speed and memory it was cut for
    devices: list[int] = field(default_factory=list)  # stage -> device
    programs: list[Program] = field(default_factory=list)
    on_ssd: dict[str, str] = field(default_factory=dict)  # stage -> what of it is there: "states" or "all"
    lanes: list[list[int]] = field(default_factory=list)  # copies of the computation -> their devices; empty: one
    shards: int = 1  # lanes that share each stage's weights
    sharding: Sharding | None = None
    to_come: tuple[str, ...] = ()  # the passes behind this one, where a pass must know
    machine: Hardware | None = None  # with lanes: all of it
    notes: dict[str, str] = field(default_factory=dict)  # pass -> a remark: a proven gap, a solver that failed

    @property
    def whole(self) -> Hardware:
        """The machine with all its lanes."""
        return self.machine or self.hardware

    def stage_of(self, name: str) -> PlannedStage:
        return next(s for s in self.stages if s.spec.name == name)

    def stages_on(self, device: int) -> list[PlannedStage]:
        return [stage for stage, d in zip(self.stages, self.devices) if d == device]
