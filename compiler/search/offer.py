"""A new plan for the machine as a run has shown it: where a device turned out slower than its document says.

The machine is taken as its document with that device slower; the plan at hand is simulated on it, and the model is
planned anew, with the pipeline at hand and its relatives, and with shares of the batch by speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...graph.blocks import Block
from ...graph.opgraph import OpGraph
from ...graph.turn_seconds import TurnSeconds
from ...ir.errors import PenstockError
from ...ir.machine.hardware import Hardware
from ...ir.machine.overrides import with_slower
from ...ir.program import Program, StageSpec
from ...ir.units import format_seconds
from ...passes.draft import MeasureBlocks
from ..plan import Plan
from ..steps import step_seconds_here
from .attempts import Attempts, SearchResult, Trace, Wishes
from .candidate import Candidate
from .prediction import make_plan
from .what_helps import relatives

OFFER_S = 20.0  # of computation
LEAST_GAIN = 0.05  # of the step; less is no offer
MORE = (1, 2, 4)  # times the number of micro-batches at hand: finer shares
PLAN_FILE, HARDWARE_FILE = "plan.json", "hardware.yaml"


@dataclass(frozen=True)
class Offer:
    """A plan that is faster on the machine as it runs. `hardware`: the document with slower devices, `times` the factor
    of each by name; `before_s` and `after_s`: simulated steps there of the plan at hand and of `plan`."""

    plan: Plan
    hardware: Hardware
    times: dict[str, float]
    before_s: float
    after_s: float

    @property
    def gain(self) -> float:
        """The share of the step that the new plan saves."""
        return 1 - self.after_s / self.before_s

    @property
    def gain_s(self) -> float:
        """The seconds of a step that the new plan saves."""
        return self.before_s - self.after_s

    def describe(self) -> str:
        """One sentence: which devices are slow and how much, and what the plan would gain."""
        slow = ", ".join(f"{name} takes {times:.1f}x as long as planned" for name, times in self.times.items())
        mesh = self.plan.decisions.mesh
        how = "other stages" if mesh is None or not mesh.micro_batches else mesh.describe().partition(": ")[2]
        return (
            f"{slow}: with {how}, a step would take {format_seconds(self.gain_s)}, {self.gain:.0%}, less (simulated: "
            f"{format_seconds(self.after_s)}, not {format_seconds(self.before_s)})"
        )

    def write(self, directory: str | Path) -> tuple[Path, Path]:
        """Write the plan and the machine's document into the directory, in place of an earlier offer. Returns their
        paths, which `compile` takes as `plan` and `hardware`."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        plan, hardware = folder / PLAN_FILE, folder / HARDWARE_FILE
        self.plan.save(plan)
        self.hardware.save(hardware)
        return plan, hardware

    def to_data(self) -> dict[str, Any]:
        """As plain data, for other ranks."""
        documents = {"plan": self.plan.model_dump_json(), "hardware": self.hardware.model_dump_json()}
        return {**documents, "times": self.times, "before_s": self.before_s, "after_s": self.after_s}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Offer:
        plan = Plan.model_validate_json(data["plan"])
        hardware = Hardware.model_validate_json(data["hardware"])
        return Offer(plan, hardware, dict(data["times"]), data["before_s"], data["after_s"])

    def __str__(self) -> str:
        return (
            f"{self.describe()}; to take it, job.save(DIRECTORY), compile with hardware=offer.hardware and "
            "plan=offer.plan, then job.resume(DIRECTORY)"
        )


def find_offer(
    trace: Trace,
    hardware: Hardware,
    wishes: Wishes,
    plan: Plan,
    programs: Sequence[Program],
    times: Mapping[int, float],
) -> Offer | None:
    """The best plan found for the machine with these devices slower by these factors; None where none saves
    `LEAST_GAIN`. Takes `OFFER_S` of computation, or as long as a candidate takes."""
    machine, options = with_slower(hardware, times), wishes.options
    names = {hardware.devices[device].name: factor for device, factor in times.items()}
    if options.profiler is not None:
        options = dataclasses.replace(options, profiler=_slow_profiler(options.profiler, hardware, names))
    stages = {name: _slowed_stage(spec, names) for name, spec in programs[0].interface.stages.items()}
    programs = [program.copy().with_interface(stages=stages) for program in programs]
    before_s = step_seconds_here(programs, machine, plan.precision)
    open_wishes = dataclasses.replace(wishes, options=options, decided=None, dump=None, search_s=OFFER_S)
    attempts = Attempts(trace, machine, open_wishes)
    for count in (plan.micro_batches * more for more in MORE):
        if wishes.batch_size % count == 0 and wishes.micro_batches in (None, count):
            attempts.look(count, _candidates(plan, attempts, count))
    try:
        found: SearchResult = attempts.result()
    except PenstockError:
        return None
    if found.best.step_s > (1 - LEAST_GAIN) * before_s:
        return None
    return Offer(make_plan(found, plan.model, plan.strategy), machine, names, before_s, found.best.step_s)


def _candidates(plan: Plan, attempts: Attempts, count: int) -> list[Candidate]:
    """The pipeline at hand with shares by speed, then others like it."""
    chosen = Candidate.parse(plan.passes, attempts.hardware.num_devices)
    first = [] if chosen.mesh is None else [chosen.with_(dataclasses.replace(chosen.mesh, by_speed=True))]
    return [*first, *relatives(plan, attempts, count)]


def _slow_profiler(profiler: MeasureBlocks, hardware: Hardware, names: Mapping[str, float]) -> MeasureBlocks:
    """A profiler whose seconds are those of the machine as it was planned for, times the factor of slower devices."""

    def profile(graph: OpGraph, blocks: list[Block], machine: Hardware) -> list[Block]:
        measured = profiler(graph, blocks, hardware)
        return [dataclasses.replace(block, seconds=_slowed_seconds(block.seconds, names)) for block in measured]

    return profile


def _slowed_seconds(seconds: Mapping[str, TurnSeconds], names: Mapping[str, float]) -> dict[str, TurnSeconds]:
    return {device: took.times(names.get(device, 1.0)) for device, took in seconds.items()}


def _slowed_stage(spec: StageSpec, names: Mapping[str, float]) -> StageSpec:
    """The stage with its measured seconds on slower devices."""
    rows = tuple((name, *(s * names.get(name, 1.0) for s in took)) for name, *took in spec.seconds)
    return dataclasses.replace(spec, seconds=rows)  # type: ignore[arg-type]

