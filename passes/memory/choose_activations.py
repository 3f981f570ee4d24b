"""`choose-activations`: which activations stay on the device, go to DRAM or SSD, or are computed again.

In: programs that keep everything on their devices. Out: the same programs in which the decided stages are
rematerialised, some with classes of saved tensors that are kept after all, and in which these and the inputs of stages
go to memories with room. It takes the place of `insert-remat`, and compares sets of the number of stages that
`insert-remat` would rematerialise. The decision follows from a model of each device's step (`activation_plan`, Fuyou
4.5) that knows what else its links carry: weights of swapped stages, gradients, and the states of the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

from ...ir import ops
from ...ir.errors import PassError
from ...ir.program import Program, plan_arena
from ...ir.units import format_bytes, format_seconds
from ..base import Pass
from ..decisions import REMATERIALISE, Activations, Decision, MemoryName
from ..draft import Draft
from ..equal_programs import once
from ..run_again import ALIKE
from .activation_machine import Machine, machine_of
from .activation_plan import CLASSES, INPUTS, ActivationProblem, Point, best, sort_by_benefit, sweep, table
from .insert_remat import stages_to_rematerialise
from .move_activations import Ahead, input_bytes, keep_classes, move_activations, turn_bytes

MEMORIES: dict[str, tuple[MemoryName, ...]] = {
    "auto": (ops.DEVICE, ops.DRAM, ops.SSD),
    "device": (ops.DEVICE,),
    "dram": (ops.DRAM,),
    "ssd": (ops.SSD,),
    "none": (ops.DEVICE,),
}
ACTIVATION_TIERS = ("auto", "states", "all", "none")
MANY_STAGES = 100  # of a device, of which one more or less that keeps everything is no hundredth of a step
MOST_ROUNDS = 4  # rounds of giving out less device memory until the program fits
PASSING_TURNS = 4  # turns in DRAM: two are written while one comes from the device, or read while one goes there


@dataclass(frozen=True)
class Outcome:
    """The decision for one device, and the curve it was taken from, empty where everything stays on the device."""

    choices: dict[str, Activations]
    points: tuple[Point, ...] = ()
    chosen: Point | None = None


@dataclass(frozen=True)
class ChooseActivations(Pass):
    """`to`: where inputs and classes go; "auto": to the first memory with room; "dram", "ssd": all of them there,
    whatever has room; "device": nothing moves; "none": nothing moves and no classes are kept. `share`: the share of all
    class bytes that is kept, instead of the best one (Fuyou's swap coefficient). `swap`, `tier`: as insert-fetch and
    insert-ssd will get them; "none": no SSD."""

    name: ClassVar[str] = "choose-activations"
    rank: ClassVar[int] = 61
    needs: ClassVar[tuple[str, ...]] = ("programs",)
    gives: ClassVar[tuple[str, ...]] = ("remat",)
    label_rank: ClassVar[int] = 1
    decides: ClassVar[tuple[Decision, ...]] = (
        REMATERIALISE,
        # stage -> saved tensors that backward finds; for others all or none
        Decision("activations", dict[str, Activations], {}, hashed=True),
    )
    to: str = "auto"
    share: float = -1.0
    swap: bool = False
    tier: str = "auto"

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return ["activations chosen"]

    def plan(self, draft: Draft) -> dict[str, Any]:
        """`rematerialise`: names of stages; `activations`: choices for those that keep classes or move something."""
        outcomes: dict[int, Outcome] = {}
        choices: dict[str, Activations] = {}
        known: dict[Hashable, tuple[Machine, Outcome]] = {}
        for program in draft.programs:
            machine = self.machine(draft, program)
            model, outcome = once(known, machine.look(program), lambda: (machine, self.on_one(program, machine)))  # noqa: B023
            outcomes[program.device] = outcome
            choices = {**_as_on(machine, model, outcome.choices), **choices}
        remark = _remark(draft, outcomes, self.to)
        if remark:
            draft.notes[self.name] = remark
        names = [stage.spec.name for stage in draft.stages if stage.spec.name in choices]
        moved = {name: choices[name] for name in names if not choices[name].is_plain}
        return {"rematerialise": names, "activations": moved}

    def rewrite(self, draft: Draft, decision: dict[str, Any]) -> None:
        choices = _read_decision(draft, decision["rematerialise"], decision["activations"])
        known: dict[Hashable, Ahead] = {}
        for program in draft.programs:
            machine = self.machine(draft, program)
            mine = tuple(
                (spec.name in choices, choices.get(spec.name, Activations()).shape(spec)) for spec in machine.specs
            )
            ahead = once(known, (machine.look(program), mine), lambda: _ahead(program, choices, machine))  # noqa: B023
            keep_classes(program, choices)
            move_activations(program, choices, ahead)

    def __post_init__(self) -> None:
        for key, value, known in (("to", self.to, tuple(MEMORIES)), ("tier", self.tier, ACTIVATION_TIERS)):
            if value not in known:
                raise PassError(f"pass {self.name!r}: option {key}={value!r} is none of {', '.join(known)}")
        if self.share > 1:
            raise PassError(f"pass {self.name!r}: option share={self.share} is no part of a whole: 0 to 1")

    def machine(self, draft: Draft, program: Program) -> Machine:
        if any(node.target is ops.backward_input for node in program.ops()):
            raise PassError(f"{self.name} needs whole backwards, but the schedule splits them; use insert-remat")
        return machine_of(draft, program, swap=self.swap, tier=self.tier)

    def on_one(self, program: Program, machine: Machine) -> Outcome:
        """The shortest step of one device, over a few sets of stages that keep everything."""
        able = [spec.name for spec in machine.specs if spec.rematerialisable and spec.name in machine.trained]
        forced = self.to in ("dram", "ssd") or self.share >= 0
        if not forced and machine.keeps_all(program):
            return Outcome({})
        if self.to == "none" or not able:
            return Outcome({name: Activations() for name in self.usual(program, machine)})
        found = [self.curve(program, machine, able, MEMORIES[self.to])]
        if not forced and len(able) <= MANY_STAGES:
            found.append(self.curve(program, machine, able[:-1], MEMORIES[self.to]))
            if not found[0][0].swapped:  # moving activations lets weights stay; moving weights may be better
                found += [self.curve(program, machine, names, (ops.DEVICE,)) for names in (able, able[:-1])]
            usual_bytes = median(machine.counts[spec.name] * spec.kept_bytes for spec in machine.specs)
            if found[0][0].room.device_bytes >= usual_bytes:  # one more stage may keep everything
                for names in self.fewer(program, machine, able):
                    found.append(self.curve(program, machine, names, MEMORIES[self.to]))
        return _fitting(program, machine, *min(found, key=lambda row: _rank(row[0], row[1], self.share)), self.share)

    def fewer(self, program: Program, machine: Machine, able: Sequence[str]) -> list[list[str]]:
        """The stages to rematerialise, of the number that `insert-remat` would: the largest and earliest, which have
        the most time to move their saved tensors; and those that `insert-remat` would take, where they take less
        time."""
        specs = {spec.name: spec for spec in machine.specs}
        usual = set(self.usual(program, machine))
        largest = set(sorted(able, key=lambda name: -specs[name].kept_bytes)[: len(usual)])
        usual_s, largest_s = (
            sum(machine.seconds(specs[name]).rematerialise_s for name in names) for names in (usual, largest)
        )
        sets = [largest, usual] if usual_s < largest_s * (1 - ALIKE) else [largest]
        return [[name for name in able if name in names] for names in sets]

    def usual(self, program: Program, machine: Machine) -> list[str]:
        """The stages that `insert-remat` would rematerialise."""
        again_s = {spec.name: machine.seconds(spec).rematerialise_s for spec in machine.specs}
        specs, resident = list(machine.specs), machine.resident
        return stages_to_rematerialise(program, specs, again_s, machine.budget_bytes, self.swap, resident)

    def curve(
        self, program: Program, machine: Machine, names: Sequence[str], memories: tuple[MemoryName, ...]
    ) -> tuple[ActivationProblem, list[Point]]:
        """The model of the step in which these stages are rematerialised and use these memories, and its sweep."""
        memories = tuple(m for m in memories if m != ops.SSD or machine.has_ssd)
        if not memories:
            raise PassError(
                f"pass {self.name!r}: option to={self.to!r}, but the host of {machine.device.name} has no SSD"
            )
        away = Activations(inputs_to=memories[-1] if len(memories) == 1 else ops.DRAM)
        trial = program.copy()
        keep_classes(trial, {name: away for name in names})
        inputs = input_bytes(trial, {name: away for name in names})
        move_activations(trial, {name: away for name in names}, Ahead())
        swapped = machine.must_swap(trial)
        problem = problem_of(machine, names, memories, inputs, machine.room_bytes(trial, swapped), swapped)
        return problem, sweep(problem, self.share)


def problem_of(
    machine: Machine,
    names: Sequence[str],
    memories: tuple[MemoryName, ...],
    inputs: Mapping[str, int],
    device_bytes: float,
    swapped: bool,
) -> ActivationProblem:
    """The model of the step in which these stages are rematerialised, and activations may take `device_bytes`."""
    forward, backward = machine.halves(names, swapped)
    items = tuple(item for spec in machine.specs if spec.name in names for item in machine.items(spec))
    room = machine.room(swapped, device_bytes)
    if ops.SSD in memories:  # what goes to SSD passes through DRAM
        turn_bytes = Counter({name: inputs.get(name, 0) for name in names})  # of all that a stage could have moved
        for item in items:
            turn_bytes[item.stage] += item.bytes
        turns = [turn_bytes[name] / machine.counts[name] for name in names]
        room = replace(room, passing_bytes=PASSING_TURNS * max(turns, default=0))
    return ActivationProblem(forward, backward, machine.rates, room, items, inputs, tuple(names), memories, swapped)


def _as_on(machine: Machine, other: Machine, choices: Mapping[str, Activations]) -> dict[str, Activations]:
    """The choices made for another device that is alike, by this device's stages."""
    return {
        spec.name: choices[model.name].rename(model, spec)
        for spec, model in zip(machine.specs, other.specs)
        if model.name in choices
    }


def _rank(problem: ActivationProblem, points: Sequence[Point], share: float) -> tuple[bool, bool, float]:
    """A sort key: whether something lacks room, then whether two stages' weights do, then the step."""
    chosen = best(points, share)
    return not chosen.fits, problem.room.device_bytes < 0, chosen.step_s


def _fitting(
    program: Program, machine: Machine, problem: ActivationProblem, points: list[Point], share: float
) -> Outcome:
    """The best of the curve; less device memory is given out until the program itself fits."""
    for _ in range(MOST_ROUNDS):
        chosen = best(points, share)
        outcome = Outcome(_choices(problem, chosen), tuple(points), chosen)
        if ops.DEVICE not in chosen.places.values():
            break
        trial = program.copy()
        keep_classes(trial, outcome.choices)
        move_activations(trial, outcome.choices, Ahead())
        lacking_bytes = -machine.room_bytes(trial, problem.swapped)
        if lacking_bytes <= 0:
            break
        room = replace(problem.room, device_bytes=max(0.0, problem.room.device_bytes - lacking_bytes))
        problem = replace(problem, room=room)
        points = sweep(problem, share)
    return outcome


def _choices(problem: ActivationProblem, point: Point) -> dict[str, Activations]:
    """The decision of a point of the curve for each stage."""
    kept: dict[str, list[str]] = {stage: [] for stage in problem.stages}
    for item in sort_by_benefit(problem.items, problem.stages)[: point.count]:
        kept[item.stage].append(item.name)
    return {
        stage: Activations(
            classes=[item.name for item in problem.items if item.stage == stage and item.name in kept[stage]],
            classes_to=point.places.get((stage, CLASSES), ops.DEVICE),
            inputs_to=point.places.get((stage, INPUTS), ops.DEVICE),
        )
        for stage in problem.stages
    }


def _read_decision(draft: Draft, names: Sequence[str], decided: Mapping[str, Activations]) -> dict[str, Activations]:
    """The choice for each rematerialised stage. Raises `PassError` where a plan names what is not there."""
    known = {stage.spec.name: stage.spec for stage in draft.stages}
    for name in (*names, *decided):
        if name not in known:
            raise PassError(f"rematerialise or activations names {name!r}; the stages are {', '.join(known)}")
        if not known[name].rematerialisable:
            raise PassError(f"{name} writes a buffer that its forward reads; it cannot be rematerialised")
    for name, row in decided.items():
        if name not in names:
            raise PassError(f"activations names {name}, which keeps everything; add it to rematerialise")
        there = [saved.name for saved in known[name].saved]
        wrong = [kind for kind in row.classes if kind not in there]
        if wrong:
            raise PassError(f"activations of {name} keeps {wrong[0]!r}; its classes are {', '.join(there) or 'none'}")
        for key, memory in (("classes_to", row.classes_to), ("inputs_to", row.inputs_to)):
            if memory not in ops.MEMORIES:
                raise PassError(f"activations of {name}: {key} is {memory!r}, not one of {', '.join(ops.MEMORIES)}")
    return {name: decided.get(name, Activations()) for name in names}


def _ahead(program: Program, choices: Mapping[str, Activations], machine: Machine) -> Ahead:
    """The most turns ahead that memory holds, up to those of one stage (Fuyou 4.4)."""
    trial = program.copy()
    keep_classes(trial, choices)
    each_bytes, disk_bytes = turn_bytes(trial, choices, (ops.DRAM, ops.SSD)), turn_bytes(trial, choices, (ops.SSD,))
    if not each_bytes:
        return Ahead()
    move_activations(trial, choices, Ahead())
    swapped, taken_bytes = machine.must_swap(trial), plan_arena(trial, ops.DRAM)[1]
    most = max(2, *machine.counts.values())
    room_bytes = max(0.0, machine.room_bytes(trial, swapped))
    fetch = min(most, 1 + int(room_bytes // each_bytes))
    spare_bytes = max(0.0, machine.room(swapped, 0).dram_bytes - taken_bytes)
    passing = min(most, int(spare_bytes // (2 * disk_bytes))) if disk_bytes else 0
    return Ahead(fetch, max(1, passing))


def _remark(draft: Draft, outcomes: Mapping[int, Outcome], to: str) -> str:
    """The decision on the device with the longest step, and the curve it was taken from."""
    rows = [(outcome.chosen.step_s, -device) for device, outcome in outcomes.items() if outcome.chosen is not None]
    if not rows:
        return ""
    device = -max(rows)[1]
    outcome, name = outcomes[device], draft.lane_hardware.devices[device].name
    chosen = outcome.chosen
    assert chosen is not None
    why = f" as {ops.DRAM} has no room for them" if chosen.ssd_bytes and ops.DRAM in MEMORIES[to] else ""
    head = (
        f"{name} keeps {format_bytes(chosen.kept_bytes)} of saved tensors and moves "
        f"{format_bytes(chosen.moved_bytes)} of activations, {format_bytes(chosen.ssd_bytes)} of them to SSD{why}: "
        f"{format_seconds(chosen.step_s)} a step by the model, bound by {chosen.forward_bound} in forward and by "
        f"{chosen.backward_bound} in backward"
    )
    return f"{head}\n{table(outcome.points, chosen)}"
