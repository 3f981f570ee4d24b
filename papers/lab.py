"""Trials for paper reproductions: a model on a machine under a pipeline of passes, planned and simulated.

A trial needs no weights and no GPU: it compiles the programs that would run and gives them to the simulator. What
trials have in common (a model's op graph, its blocks with their costs, equal trials) is computed once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ..compiler.capture.trace import trace_in
from ..compiler.models.named import find_model
from ..compiler.pipeline import parse_pipeline, pipeline_text, run_passes
from ..compiler.search.fit import check_fit
from ..graph.blocks import Block
from ..graph.costs.stage_time import block_seconds
from ..graph.opgraph import OpGraph
from ..ir import ops
from ..ir.calls import op_of
from ..ir.errors import DoesNotFit, VerifyError
from ..ir.machine.hardware import Hardware
from ..ir.precision import Precision
from ..ir.program import Program, StageSpec, shown, work_of
from ..ir.verify import verify
from ..passes.base import Pass
from ..passes.draft import Draft, Options
from ..runtime.simulate import Timeline, simulate
from ..runtime.simulate.time_ranges import length, overlap, union

MOVES = (ops.H2D, ops.D2H, ops.SEND, ops.COMM)  # streams of transfers; a receive is its sender's transfer


@dataclass(frozen=True)
class Workload:
    """A model and its global batch: `micro_batches` of `micro_batch` rows.

    `sequence` is the number of tokens in a row, `targets` that in a row of an encoder-decoder's labels (None: the same
    number). `state_bytes` are those of the optimizer per parameter.
    """

    model: str
    micro_batch: int
    micro_batches: int
    sequence: int = 512
    targets: int | None = None
    precision: str = "fp16"
    state_bytes: float = 8.0


@dataclass(frozen=True)
class Transfer:
    """One transfer of a step: its bytes, and its begin and end in seconds since the step began."""

    device: int
    op: str
    moved_bytes: int
    start_s: float
    end_s: float

    @property
    def rate(self) -> float:
        """Bytes/s over the transfer's whole time."""
        return self.moved_bytes / (self.end_s - self.start_s) if self.end_s > self.start_s else float("inf")


@dataclass
class SimulatedStep:
    """One planned and simulated step. If it does not fit it has no timeline, and `misses` says why."""

    workload: Workload
    hardware: Hardware
    params: int
    timeline: Timeline | None = None
    misses: str = ""
    misses_in: str = ""  # the memory that lacks room
    stages: list[list[str]] = field(default_factory=list)  # stage -> its blocks
    transfers: list[Transfer] = field(default_factory=list)
    planning_cpu_s: dict[str, float] = field(default_factory=dict)  # pass -> processor seconds of its planning
    decisions: dict[str, Any] = field(default_factory=dict)  # by field of a plan
    programs: list[Program] = field(default_factory=list)  # those of a lane if there are several
    specs: list[StageSpec] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        return self.timeline.step_s if self.timeline else None

    @property
    def computed_s(self) -> float | None:
        """Seconds from the step's begin to the end of its last backward: the step as Mobius's eq. 3 defines it, without
        the optimizer."""
        return max(s.end_s for s in self.timeline.spans if s.stream == ops.COMPUTE) if self.timeline else None

    @property
    def model_bytes(self) -> int:
        """The bytes of all parameters in fp32, which Mobius's figures call the model size."""
        return 4 * self.params

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes over the devices' own PCIe links in a step: to the devices, and from them."""
        assert self.timeline is not None
        moved = self.timeline.moved_bytes
        names = self.timeline.device_names
        return sum(moved.get(f"{name}.down", 0) for name in names), sum(moved.get(f"{name}.up", 0) for name in names)

    def compute_s(self) -> list[float]:
        """For each device, the seconds that it computes."""
        assert self.timeline is not None
        return [
            share * self.timeline.step_s
            for (_, stream), share in self.timeline.busy_share.items()
            if stream == ops.COMPUTE
        ]


class ModelSource(Protocol):
    """The part of `compiler.models.named.NamedModel` that a trial needs."""

    def on_meta(self) -> nn.Module: ...

    def batch_spec(self, batch: int, sequence: int, targets: int | None = None) -> dict[str, dict[str, Any]]: ...


class Lab:
    """Runs trials. `say` gets a text about each new one; `models` has those that `compiler/models` does not name."""

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.say = say
        self.models: dict[str, ModelSource] = {}
        self.graphs: dict[Any, OpGraph] = {}
        self.coarsened: dict[Any, tuple[list[Block], dict[str, str]]] = {}
        self.trials: dict[Any, SimulatedStep] = {}

    def trial(self, workload: Workload, hardware: Hardware, line: str) -> SimulatedStep:
        """Plan and simulate one step under a pipeline's text or a strategy's name.

        A step that does not fit has no timeline. Raises `PassError` for an unknown pipeline.
        """
        key = (workload, hardware.model_dump_json(), line)
        if key not in self.trials:
            self.say(f"{workload.model}, {workload.micro_batches} x {workload.micro_batch}, {hardware.name}: {line}")
            self.trials[key] = self._try(workload, hardware, parse_pipeline(line, hardware.num_devices))
        return self.trials[key]

    def draft(self, workload: Workload, hardware: Hardware, coarsen: Pass) -> Draft:
        """A new draft with its blocks."""
        graph = self._graph(workload, hardware.devices[0].kind)
        options = Options(workload.micro_batches, workload.precision, state_bytes_per_param=workload.state_bytes)
        draft = Draft(graph, hardware, options)
        key = (id(graph), hardware.devices[0].kind, pipeline_text([coarsen]))
        if key not in self.coarsened:
            run_passes(draft, [coarsen])
            self.coarsened[key] = (draft.blocks, draft.notes)
        blocks, notes = self.coarsened[key]
        draft.blocks, draft.notes = list(blocks), dict(notes)
        return draft

    def _graph(self, workload: Workload, kind: str) -> OpGraph:
        key = (workload.model, workload.micro_batch, workload.sequence, workload.targets, workload.precision, kind)
        if key not in self.graphs:
            named = self.models.get(workload.model) or find_model(workload.model)
            precision = Precision.of(workload.precision)
            spec = named.batch_spec(workload.micro_batch, workload.sequence, workload.targets)
            graph = trace_in(precision, named.on_meta(), spec, device_kind=kind)
            graph.boundary_dtype = precision.boundary_dtype()
            self.graphs[key] = graph
        return self.graphs[key]

    def _try(self, workload: Workload, hardware: Hardware, passes: Sequence[Pass]) -> SimulatedStep:
        draft = self.draft(workload, hardware, passes[0])
        made = SimulatedStep(workload, hardware, num_params(draft.graph.model))
        begin_s = time.process_time()

        def after(name: str, _: Draft) -> None:
            made.planning_cpu_s[name] = time.process_time() - begin_s - sum(made.planning_cpu_s.values())

        try:
            made.decisions, _ = run_passes(draft, passes[1:], dump=after, check=False)
            check_fit(draft)
        except DoesNotFit as error:
            made.misses, made.misses_in = str(error).split("\n")[0], error.memory
            return made
        try:
            verify(draft.programs, draft.lane_hardware)
        except VerifyError as error:
            made.misses = f"memories are so tight that devices would wait for each other for ever: {error}"
            return made
        made.timeline = simulate(draft.programs, hardware, precision=workload.precision)
        made.programs = draft.programs
        made.stages = draft.partition
        made.specs = [stage.spec for stage in draft.stages]
        made.transfers = list(transfers(shown(draft.programs, hardware)[0], made.timeline))
        return made


def num_params(model: nn.Module) -> int:
    """The number of parameters of a model, tied ones counted once."""
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def transfers(programs: Sequence[Program], timeline: Timeline) -> Iterator[Transfer]:
    """Every transfer of a simulated step. Each member of a collective has a transfer of its own, with the bytes that it
    sends to its neighbour in the ring."""
    nodes = [(p, node) for p in programs for node in p.ops() if op_of(node).streams]
    for (program, node), span in zip(nodes, timeline.spans, strict=True):
        if span.stream in MOVES:
            work = work_of(program, node)
            yield Transfer(
                span.device, span.op, round(work.moved_bytes * _laps(program, work)), span.start_s, span.end_s
            )


def _laps(program: Program, work: ops.Work) -> float:
    """The number of times that a transfer's bytes leave a device: 1, or a collective's rounds less the member's own
    share."""
    if not work.group:
        return 1.0
    members = program.interface.size(work.group)
    return work.rounds * (members - 1) / members


def exposed_share(trial: SimulatedStep) -> float:
    """The share of the step without its optimizer in which a device moves something and computes nothing, as the mean
    over devices.

    A device's transfers are its fetches, offloads, sends, receives and collectives.
    """
    assert trial.timeline is not None
    end_s, shares = trial.computed_s or 0.0, []
    for device in range(len(trial.timeline.device_names)):
        own = [s for s in trial.timeline.spans if s.device == device and s.start_s < end_s]
        moving = union((s.start_s, min(s.end_s, end_s)) for s in own if s.stream in (*MOVES, ops.RECV))
        computing = union((s.start_s, s.end_s) for s in own if s.stream == ops.COMPUTE)
        shares.append(length(moving) - overlap(moving, computing))
    return sum(shares) / len(shares) / end_s


def share_of_bytes(trial: SimulatedStep, low: float, high: float = float("inf")) -> float:
    """Share of a step's bytes in transfers that ran at `low` to `high` bytes/s."""
    total = sum(t.moved_bytes for t in trial.transfers)
    return sum(t.moved_bytes for t in trial.transfers if low <= t.rate < high) / total


def profile_s(blocks: Sequence[Block], hardware: Hardware, precision: str, repeats: int) -> tuple[float, float]:
    """Seconds on the device to profile the distinct blocks, and to profile all blocks. A block's weights are uploaded
    first; then forward, recomputation and backward are timed."""
    device = hardware.devices[0]
    rate = hardware.bandwidth("dram0", device.name)

    def seconds(chosen: Sequence[Block]) -> float:
        return sum(b.param_bytes / rate + repeats * block_seconds(b, device, precision).both_s for b in chosen)

    return seconds(list({b.hash: b for b in blocks}.values())), seconds(blocks)
