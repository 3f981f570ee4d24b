"""A compilation under way: what passes read and write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ..ir.machine.hardware import Hardware
from ..ir.precision import GradientDtype, Precision
from ..ir.program import Program
from .decisions import Lanes, OnSsd, Sharding

if TYPE_CHECKING:
    from .graph.blocks import Block
    from .graph.opgraph import OpGraph
    from .graph.stages import PlannedStage

# Measures blocks on the devices of this machine; returns them with seconds by device name.
MeasureBlocks = Callable[["OpGraph", list["Block"], Hardware], list["Block"]]
StateBytes = Callable[[str, tuple[int, ...]], int]  # of optimizer states, for a parameter's name and shape


class Lasting(NamedTuple):
    """Bytes that stay across steps."""

    weights: int
    masters: int
    states: int


@dataclass(frozen=True)
class Options:
    """What the user asked for, besides model and hardware. Amounts are per global batch unless said otherwise."""

    micro_batches: int = 1
    precision: str = "fp32"
    gradient_dtype: GradientDtype = "fp32"  # in which gradients of several micro-batches are added up
    max_grad_norm: float | None = None
    state_bytes_per_param: float = 8.0
    state_bytes_of: StateBytes | None = None  # where the bytes depend on a parameter's shape
    takes_whole: Callable[[str], bool] | None = None  # whether a parameter's optimizer needs all of it; None: none does
    profiler: MeasureBlocks | None = None  # None: times come from the roofline

    @property
    def optimizer_bytes_per_param(self) -> float:
        """Bytes that the optimizer keeps for one trained parameter: its master and its states."""
        return Precision.of(self.precision).master_bytes + self.state_bytes_per_param

    def lasting(self, weight_bytes: int, trained_params: int) -> Lasting:
        """What stays across steps, for lower bounds: a run rounds every part up a little (`bytes_of_homes`)."""
        masters = Precision.of(self.precision).master_bytes * trained_params
        return Lasting(weight_bytes, masters, int(self.state_bytes_per_param * trained_params))


@dataclass
class Draft:
    """A compilation under way. Fields fill from top to bottom; `programs` exist from the schedule on.

    With several lanes, all but `machine` and `mesh` is about one lane, whose part of the machine is `lane_hardware`.
    """

    graph: OpGraph
    machine: Hardware  # all of it
    options: Options = field(default_factory=Options)
    blocks: list[Block] = field(default_factory=list)
    partition: list[list[str]] = field(default_factory=list)  # stage -> names of its blocks
    stages: list[PlannedStage] = field(default_factory=list)
    planned_for: list[int] = field(default_factory=list)  # stage -> the device whose speed and memory it was cut for
    devices: list[int] = field(default_factory=list)  # stage -> device
    programs: list[Program] = field(default_factory=list)
    mesh: Lanes = field(default_factory=lambda: Lanes(lanes=[]))  # no lanes: one lane of all devices
    lane_part: Hardware | None = None  # the part of the machine that one lane has; None: all of it
    sharding: Sharding | None = None
    ssd: OnSsd = field(default_factory=OnSsd)
    promised: frozenset[str] = frozenset()  # what the pipeline's passes give, also those that come later
    notes: dict[str, str] = field(default_factory=dict)  # pass -> a remark: a proven gap, a solver that failed

    @property
    def lane_hardware(self) -> Hardware:
        """The part of the machine that one lane has."""
        return self.lane_part or self.machine

    def stage_of(self, name: str) -> PlannedStage:
        return next(s for s in self.stages if s.spec.name == name)

    def stages_on(self, device: int) -> list[PlannedStage]:
        return [stage for stage, d in zip(self.stages, self.devices) if d == device]
