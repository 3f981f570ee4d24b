"""`keep-stages`: some stages stay whole on a device that cannot hold all of them.

In: programs whose weights are resident. Out: a decision, the resident stages, for the passes that rematerialise, fetch,
and update. A resident stage has its weights, gradients, masters and optimizer states on its device, where it is
updated; the others come from DRAM and are updated on the host (Mobius 3.1), under the backward of the resident ones.

What a byte of the device's memory is worth decides: stages are taken in order of the seconds that they save per byte on
links, disks and the CPU, of equals those whose gradients come last, which nothing would hide. Along that order, the
model of `choose-activations` says for how many the step is shortest, as they take memory from kept activations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from ...ir import ops
from ...ir.errors import PassError
from ...ir.program import Program, StageSpec
from ...ir.units import format_bytes, format_seconds
from ..base import Pass
from ..decisions import Decision
from ..draft import Draft
from ..equal_programs import once
from ..optimizer.timing import tie_groups, updates_of
from .activation_machine import Machine, if_resident, machine_of
from .activation_plan import best, sweep
from .choose_activations import ACTIVATION_TIERS, MEMORIES, ChooseActivations, problem_of

COUNTS = 8  # numbers of resident stages that are compared


@dataclass(frozen=True)
class KeepStages(Pass):
    """`share`: the share of the device's memory beside the least for activations that resident stages take; by default
    the best one. `tier`: the option of the insert-ssd that follows; "none": no SSD."""

    name: ClassVar[str] = "keep-stages"
    rank: ClassVar[int] = 59
    needs: ClassVar[tuple[str, ...]] = ("programs",)
    precedes: ClassVar[tuple[str, ...]] = ("remat",)
    label_rank: ClassVar[int] = 2
    decides: ClassVar[tuple[Decision, ...]] = (Decision("resident", list[str], []),)
    share: float = -1.0
    tier: str = "none"

    def __post_init__(self) -> None:
        if self.share > 1:
            raise PassError(f"pass {self.name!r}: option share={self.share}; allowed: 0 to 1, or less for the best one")
        if self.tier not in ACTIVATION_TIERS:
            raise PassError(f"pass {self.name!r}: option tier={self.tier!r} is none of {', '.join(ACTIVATION_TIERS)}")

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return ["resident stages" if self.share < 0 else f"resident stages in {self.share:.0%} of the memory"]

    def plan(self, draft: Draft) -> list[str]:
        """Names of the resident stages; none on a device that holds all of its stages."""
        if draft.mesh.shards > 1 or draft.copies:
            return []
        chosen: list[str] = []
        known: dict[Hashable, list[int]] = {}
        for program in draft.programs:
            specs = [stage.spec for stage in draft.stages_on(program.device)]
            together = _together(draft, specs)
            machine = machine_of(draft, program, swap=False, tier=self.tier)
            key = machine.look(program), tuple(map(tuple, together))
            found = once(known, key, lambda: self.on_one(draft, program, machine, together))  # noqa: B023
            chosen += [specs[i].name for i in found]
        return [stage.spec.name for stage in draft.stages if stage.spec.name in chosen]

    def rewrite(self, draft: Draft, decision: list[str]) -> None:
        known = [stage.spec.name for stage in draft.stages]
        for name in decision:
            if name not in known:
                raise PassError(f"resident names {name!r}; the stages are {', '.join(known)}")
        draft.resident = frozenset(decision)

    def on_one(self, draft: Draft, program: Program, machine: Machine, together: Sequence[Sequence[int]]) -> list[int]:
        """The resident stages of one device, by their numbers there. `together`: see `_together`."""
        again = [spec.name for spec in machine.specs if spec.rematerialisable and spec.name in machine.trained]
        problem, _ = ChooseActivations(tier=self.tier).curve(program, machine, again, MEMORIES["auto"])
        if not problem.swapped:
            return []
        updates = updates_of(draft, {})
        each_bytes = [_resident_bytes(machine, spec) for spec in machine.specs]
        benefit = [_saved_s(machine, spec) / max(1, taken) for spec, taken in zip(machine.specs, each_bytes)]
        order = sorted(together, key=lambda group: (-_round(min(benefit[i] for i in group)), -len(group), group))
        room, update = problem.room.device_bytes, [_update_bytes(machine, spec) for spec in machine.specs]
        chosen, taken = list[Sequence[int]](), [0.0]  # and the bytes that the first of these take, updates included
        for group in order:
            stages = [*chain(*chosen), *group]
            num_bytes = sum(each_bytes[i] for i in stages) + max(update[i] for i in stages)
            if num_bytes <= (room if self.share < 0 else self.share * room):
                chosen.append(group)
                taken.append(num_bytes)
        if self.share >= 0:
            return sorted(chain(*chosen))

        def step_s(count: int) -> float:
            resident = frozenset(machine.specs[i].name for i in chain(*chosen[:count]))
            trial = if_resident(machine, draft, resident, self.tier)
            if trial.tiers.dram_bytes < 0:
                return math.inf
            found = problem_of(trial, again, problem.memories, problem.inputs, room - taken[count], True)
            late_s = sum(s.trained_params for s in trial.moving if updates.is_late(s.name)) / trial.updates_per_s
            backward = replace(found.backward, cpu_s=max(0.0, found.backward.cpu_s - late_s))
            return best(sweep(replace(found, backward=backward))).step_s + late_s

        counts = {round(len(chosen) * i / COUNTS) for i in range(COUNTS + 1)}
        took = {count: step_s(count) for count in counts}
        count = min(took, key=lambda count: (took[count], -count))
        draft.notes[self.name] = (
            f"{machine.device.name} has room for {format_bytes(room)} of stages beside those that it fetches; "
            f"{format_bytes(taken[count])} stay, by the model {_takes(took[count])} a step, with none {_takes(took[0])}"
            + (f", with all that fit {_takes(took[len(chosen)])}" if count < len(chosen) else "")
        )
        return sorted(chain(*chosen[:count]))


def _takes(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "DRAM is too small"


def _together(draft: Draft, specs: Sequence[StageSpec]) -> list[list[int]]:
    """The numbers of a device's stages that have parameters, in groups that share some: these are added up together,
    so that one memory holds their gradients. A group with stages on other devices is left out."""
    number = {spec.name: i for i, spec in enumerate(specs)}
    groups = [{spec.name} for spec in specs if spec.params]
    for rows in tie_groups(draft).values():
        tied = {stage for _, stage, _ in rows}
        tied |= {name for group in groups if group & tied for name in group}
        groups = [group for group in groups if not group & tied] + [tied]
    return sorted(sorted(number[name] for name in group) for group in groups if group <= number.keys())


def _resident_bytes(machine: Machine, spec: StageSpec) -> int:
    """Bytes of the device that a stage takes beyond what stays of it in any case."""
    if spec.staying:
        return spec.weight_bytes
    return spec.weight_bytes + spec.grad_bytes + machine.interface.optimizer_bytes(spec)


def _update_bytes(machine: Machine, spec: StageSpec) -> int:
    interface = machine.interface
    return interface.update_bytes(spec, ops.DEVICE, True) + interface.temporary_bytes(spec, ops.DEVICE)


def _round(value: float) -> float:
    """A benefit without its last digits: stages of one kind differ little."""
    return float(f"{value:.2g}")


def _saved_s(machine: Machine, spec: StageSpec) -> float:
    """Seconds on links, disks and the CPU that a resident stage saves."""
    rates, tiers = machine.rates, machine.tiers
    moved = not spec.staying and spec.name in machine.trained
    states = machine.interface.states_bytes(spec) * tiers.states if moved else 0.0
    weights = spec.weight_bytes * (1 + (spec.name in machine.trained))
    saved_s = weights / rates.h2d + (weights * tiers.weights + states) / rates.read
    if moved:
        saved_s += spec.grad_bytes / rates.d2h + spec.trained_params / machine.updates_per_s + states / rates.write
    return saved_s
