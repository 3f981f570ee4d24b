"""A compilation under way: what passes read and write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..ir.machine.hardware import Hardware
from ..ir.precision import BoundaryDtype, GradientDtype, Precision
from ..ir.program import ParamSpec, Program, slice_of
from .decisions import Lanes, OnSsd, Sharding

if TYPE_CHECKING:
    from ..graph.blocks import Block
    from ..graph.opgraph import OpGraph
    from ..graph.stages import PlannedStage

# Measures blocks on the devices of this machine; returns them with seconds by device name.
MeasureBlocks = Callable[["OpGraph", list["Block"], Hardware], list["Block"]]
# The bytes of the optimizer states of a parameter, by its name, its shape, and the dtype in which it is stepped.
StateBytes = Callable[[str, tuple[int, ...], str], int]
# The bytes that a step takes while it runs, by the names, shapes and dtypes of parameters, and their memory.
StepBytes = Callable[[Sequence[tuple[str, tuple[int, ...], str]], str], int]


class Lasting(NamedTuple):
    """Bytes that stay across steps."""

    weights: int
    masters: int
    states: int


KernelChoice = Literal["written", "fused"]


@dataclass(frozen=True)
class Options:
    """The user's wishes besides model and hardware. Amounts are per global batch unless said otherwise."""

    micro_batches: int = 1
    precision: str = "fp32"
    gradient_dtype: GradientDtype = "fp32"  # in which gradients of several micro-batches are added up
    boundary_dtype: BoundaryDtype = "compute"  # of activations between stages that autocast leaves in fp32
    max_grad_norm: float | None = None
    state_bytes_per_param: float = 8.0
    state_bytes_of: StateBytes | None = None  # where the bytes are not the same for each element
    step_bytes_of: StepBytes | None = None  # None: a step takes nothing
    takes_whole: Callable[[str], bool] | None = None  # whether a parameter's optimizer needs all of it; None: none does
    whole_optimizer: str = ""  # the first class that needs all of a parameter
    optimizer_tiles: bool = False  # a host updates parameters in tiles
    optimizer_rounds: bool = False  # the optimizer itself rounds what it writes into weights without masters
    cuda_graphs: bool = False  # stages run from CUDA graphs where they can
    compile_stages: bool = False  # torch.compile runs repeated blocks
    kernels: KernelChoice = "written"  # or chains of pointwise calls as one
    profiler: MeasureBlocks | None = None  # None: times come from the roofline

    @property
    def needs_norm(self) -> bool:
        """Whether updates wait for the norm of all gradients."""
        return self.max_grad_norm is not None or Precision.of(self.precision).scales_loss

    @property
    def optimizer_bytes_per_param(self) -> float:
        """Bytes that the optimizer keeps for one trained parameter, its master and its states, on average."""
        return Precision.of(self.precision).master_bytes + self.state_bytes_per_param

    def master_bytes(self, params: Iterable[ParamSpec]) -> int:
        """Bytes of the fp32 masters of those of the parameters that are trained."""
        return Precision.of(self.precision).master_bytes * sum(p.numel for p in params if p.requires_grad)

    def state_bytes(self, params: Iterable[ParamSpec]) -> int:
        """Bytes of the optimizer states of those of the parameters that are trained."""
        each, trained = self.state_bytes_of, [p for p in params if p.requires_grad]
        if each is None:
            return int(self.state_bytes_per_param * sum(p.numel for p in trained))
        return sum(each(_owner(p), p.shape, self._stepped_dtype(p)) for p in trained)

    def step_bytes(self, params: Iterable[ParamSpec], memory: str) -> int:
        """Bytes that the optimizer takes while it steps those of the parameters that are trained."""
        if self.step_bytes_of is None:
            return 0
        trained = [(_owner(p), p.shape, self._stepped_dtype(p)) for p in params if p.requires_grad]
        return self.step_bytes_of(trained, memory)

    def _stepped_dtype(self, param: ParamSpec) -> str:
        precision = Precision.of(self.precision)
        full = precision.has_masters or (precision.is_pure and not self.optimizer_rounds)
        return "float32" if full else param.dtype

    def optimizer_bytes(self, params: Sequence[ParamSpec]) -> int:
        """Bytes that the optimizer keeps of parameters: masters and states."""
        return self.master_bytes(params) + self.state_bytes(params)

    def lasting(self, weight_bytes: int, params: Sequence[ParamSpec]) -> Lasting:
        """The bytes that last across steps, for lower bounds: a run rounds every part up a little
        (`bytes_of_homes`)."""
        return Lasting(weight_bytes, self.master_bytes(params), self.state_bytes(params))


def _owner(param: ParamSpec) -> str:
    """The parameter of the model that this one is, or is a part of."""
    return param.whole_name


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
    devices: list[int] = field(default_factory=list)  # stage -> device, the first one of those that run it
    copies: dict[str, list[int]] = field(default_factory=dict)  # stage that several devices run -> these
    programs: list[Program] = field(default_factory=list)
    mesh: Lanes = field(default_factory=lambda: Lanes(lanes=[]))  # no lanes: one lane of all devices
    lane_part: Hardware | None = None  # the part of the machine that one lane has; None: all of it
    sharding: Sharding | None = None
    resident: frozenset[str] = frozenset()  # stages that stay whole on devices whose other stages are fetched
    ssd: OnSsd = field(default_factory=OnSsd)
    promised: frozenset[str] = frozenset()  # what the pipeline's passes give, also those that come later
    notes: dict[str, str] = field(default_factory=dict)  # pass -> a remark: a proven gap, a solver that failed

    @property
    def lane_hardware(self) -> Hardware:
        """The part of the machine that one lane has."""
        return self.lane_part or self.machine

    def use_machine(self, machine: Hardware) -> None:
        """Take a machine in place of the present one, from which it differs in memory alone."""
        self.lane_part = None if self.lane_part is None else slice_of(machine, self.mesh.lanes)
        self.machine = machine

    def stage_of(self, name: str) -> PlannedStage:
        return next(s for s in self.stages if s.spec.name == name)

    def stages_on(self, device: int) -> list[PlannedStage]:
        return [s for s, d in zip(self.stages, self.devices) if device in self.copies.get(s.spec.name, [d])]
