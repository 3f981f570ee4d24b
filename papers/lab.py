"""Trials for paper reproductions: a model on a machine under a pipeline of passes, planned and simulated.

A trial needs no weights and no GPU: it compiles the programs that would run and hands them to the simulator. What
trials have in common (a model's op graph, its blocks with their costs, equal trials) is made once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ..compiler.capture.trace import trace
from ..compiler.models.named import find_model
from ..compiler.pipeline import parse_pipeline, pipeline_text, run_passes
from ..compiler.search.fit import check_fit
from ..ir import ops
from ..ir.calls import op_of
from ..ir.errors import DoesNotFit, VerifyError
from ..ir.machine.hardware import Hardware
from ..ir.precision import PRECISIONS
from ..ir.program import Program, StageSpec, shown, work_of
from ..ir.verify import verify
from ..passes.base import Pass
from ..passes.draft import Draft, Options
from ..passes.graph.blocks import Block
from ..passes.graph.opgraph import OpGraph
from ..passes.stage_time import block_seconds
from ..runtime.simulate import Timeline, simulate

MOVES = (ops.H2D, ops.D2H, ops.SEND, ops.COMM)  # streams of transfers; a receive is its sender's transfer


@dataclass(frozen=True)
class Case:
    """A model and its global batch: `micro_batches` of `micro_batch` rows.

    `sequence`: tokens in a row, `targets` in a row of an encoder-decoder's labels (None: as many). `state_bytes`: of
    the optimizer, per parameter.
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
    """One transfer of a step: bytes, and seconds since the step began."""

    device: int
    op: str
    moved_bytes: int
    start_s: float
    end_s: float

    @property
    def rate(self) -> float:
        """Bytes/s over the whole time it was under way."""
        return self.moved_bytes / (self.end_s - self.start_s) if self.end_s > self.start_s else float("inf")


@dataclass
class Trial:
    """One planned and simulated step; without a timeline where it does not fit, and then `misses` says why."""

    case: Case
    hardware: Hardware
    params: int
    timeline: Timeline | None = None
    misses: str = ""
    misses_in: str = ""  # the memory that lacks room
    stages: list[list[str]] = field(default_factory=list)  # stage -> its blocks
    devices: list[int] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    planning_cpu_s: dict[str, float] = field(default_factory=dict)  # pass -> processor seconds of its planning
    notes: dict[str, str] = field(default_factory=dict)
    decisions: dict[str, Any] = field(default_factory=dict)  # by field of a plan
    programs: list[Program] = field(default_factory=list)  # of a lane, where there are several
    specs: list[StageSpec] = field(default_factory=list)

    @property
    def step_s(self) -> float | None:
        return self.timeline.step_s if self.timeline else None

    @property
    def model_bytes(self) -> int:
        """In fp32, which Mobius's figures call the model size."""
        return 4 * self.params

    @property
    def device_bytes(self) -> tuple[int, int]:
        """Bytes over the devices' own PCIe links in a step: towards the devices, and away from them."""
        assert self.timeline is not None
        moved = self.timeline.moved_bytes
        names = self.timeline.device_names
        return sum(moved.get(f"{name}.down", 0) for name in names), sum(moved.get(f"{name}.up", 0) for name in names)

    def compute_s(self) -> list[float]:
        """Per device the seconds that it computes."""
        assert self.timeline is not None
        return [
            share * self.timeline.step_s
            for (_, stream), share in self.timeline.busy_share.items()
            if stream == ops.COMPUTE
        ]


class Model(Protocol):
    """What a trial asks of a model: see `models.NamedModel`."""

    def on_meta(self) -> nn.Module: ...

    def batch_spec(self, batch: int, sequence: int, targets: int | None = None) -> dict[str, dict[str, Any]]: ...


class Lab:
    """Runs trials. `say` is told of each that takes time; `models` are those that `compiler/models` does not name."""

    def __init__(self, say: Callable[[str], None] = lambda text: None):
        self.say = say
        self.models: dict[str, Model] = {}
        self.graphs: dict[Any, OpGraph] = {}
        self.coarsened: dict[Any, tuple[list[Block], dict[str, str]]] = {}
        self.trials: dict[Any, Trial] = {}
        self.kept: dict[Any, Any] = {}  # what a paper's findings have in common besides

    def trial(self, case: Case, hardware: Hardware, line: str) -> Trial:
        """Plan and simulate one step under a pipeline's text or a strategy's name.

        A case that does not fit gives a trial without a timeline. Raises `PassError` for an unknown pipeline.
        """
        key = (case, hardware.model_dump_json(), line)
        if key not in self.trials:
            self.say(f"{case.model}, {case.micro_batches} x {case.micro_batch}, {hardware.name}: {line}")
            self.trials[key] = self._try(case, hardware, parse_pipeline(line, hardware.num_devices))
        return self.trials[key]

    def draft(self, case: Case, hardware: Hardware, coarsen: Pass) -> Draft:
        """A fresh draft with its blocks."""
        graph = self._graph(case, hardware.devices[0].kind)
        options = Options(
            micro_batches=case.micro_batches, precision=case.precision, state_bytes_per_param=case.state_bytes
        )
        draft = Draft(graph, hardware, options)
        key = (id(graph), hardware.devices[0].kind, pipeline_text([coarsen]))
        if key not in self.coarsened:
            run_passes(draft, [coarsen])
            self.coarsened[key] = (draft.blocks, draft.notes)
        blocks, notes = self.coarsened[key]
        draft.blocks, draft.notes = list(blocks), dict(notes)
        return draft

    def _graph(self, case: Case, kind: str) -> OpGraph:
        key = (case.model, case.micro_batch, case.sequence, case.targets, case.precision, kind)
        if key not in self.graphs:
            named = self.models.get(case.model) or find_model(case.model)
            low = PRECISIONS[case.precision].low_dtype
            spec = named.batch_spec(case.micro_batch, case.sequence, case.targets)
            self.graphs[key] = trace(named.on_meta(), spec, autocast=low, device_kind=kind, param_dtype=low)
        return self.graphs[key]

    def _try(self, case: Case, hardware: Hardware, passes: Sequence[Pass]) -> Trial:
        draft = self.draft(case, hardware, passes[0])
        made = Trial(case, hardware, num_params(draft.graph.model))
        begin_s = time.process_time()

        def behind(name: str, _: Draft) -> None:
            made.planning_cpu_s[name] = time.process_time() - begin_s - sum(made.planning_cpu_s.values())

        try:
            made.decisions, _ = run_passes(draft, passes[1:], dump=behind, check=False)
            check_fit(draft)
        except DoesNotFit as error:
            made.misses, made.misses_in = str(error).split("\n")[0], error.memory
            return made
        try:
            verify(draft.programs, draft.hardware)
        except VerifyError as error:
            made.misses = f"memories are so tight that devices would wait for each other for ever: {error}"
            return made
        made.timeline = simulate(draft.programs, hardware, precision=case.precision)
        made.programs = draft.programs
        made.stages, made.devices, made.notes = draft.partition, draft.devices, draft.notes
        made.specs = [stage.spec for stage in draft.stages]
        made.transfers = list(transfers(shown(draft.programs, hardware)[0], made.timeline))
        return made


def num_params(model: nn.Module) -> int:
    """Tied ones once."""
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def transfers(programs: Sequence[Program], timeline: Timeline) -> Iterator[Transfer]:
    """Every transfer of a simulated step with its bytes. A member of a collective has one of its own, with the bytes
    that it sends to its neighbour in the ring."""
    nodes = [(p, node) for p in programs for node in p.ops() if op_of(node).streams]
    for (program, node), span in zip(nodes, timeline.spans, strict=True):
        if span.stream in MOVES:
            work = work_of(program, node)
            yield Transfer(
                span.device, span.op, round(work.moved_bytes * _laps(program, work)), span.start_s, span.end_s
            )


def _laps(program: Program, work: ops.Work) -> float:
    """How often a transfer's bytes leave a device: once, or a collective's rounds without the member's own share."""
    if not work.group:
        return 1.0
    members = program.interface.size(work.group)
    return work.rounds * (members - 1) / members


def exposed_share(trial: Trial) -> float:
    """Share of the step in which a device moves something and computes nothing, the mean over devices.

    A device's transfers are its fetches, offloads, sends, receives and collectives.
    """
    assert trial.timeline is not None
    shares = []
    for device in range(len(trial.timeline.device_names)):
        own = [s for s in trial.timeline.spans if s.device == device]
        moving = _union((s.start_s, s.end_s) for s in own if s.stream in (*MOVES, ops.RECV))
        computing = _union((s.start_s, s.end_s) for s in own if s.stream == ops.COMPUTE)
        shares.append(_length(moving) - _overlap(moving, computing))
    return sum(shares) / len(shares) / trial.timeline.step_s


def share_of_bytes(trial: Trial, low: float, high: float = float("inf")) -> float:
    """Share of a step's bytes in transfers that ran at `low` to `high` bytes/s."""
    total = sum(t.moved_bytes for t in trial.transfers)
    return sum(t.moved_bytes for t in trial.transfers if low <= t.rate < high) / total


def profile_s(blocks: Sequence[Block], hardware: Hardware, precision: str, repeats: int) -> tuple[float, float]:
    """Seconds on the device to time every distinct block, and every block: forward, forward again and backward, with
    its weights uploaded first."""
    device = hardware.devices[0]
    rate = hardware.bandwidth("dram0", device.name)

    def seconds(chosen: Sequence[Block]) -> float:
        return sum(b.param_bytes / rate + repeats * block_seconds(b, device, precision).both_s for b in chosen)

    return seconds(list({b.hash: b for b in blocks}.values())), seconds(blocks)


Interval = tuple[float, float]


def _union(intervals: Iterator[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _overlap(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    total, i, j = 0.0, 0, 0
    while i < len(first) and j < len(second):
        total += max(0.0, min(first[i][1], second[j][1]) - max(first[i][0], second[j][0]))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total
