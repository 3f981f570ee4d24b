"""The update part of programs: gradients are reduced, clipped and used. `insert-optimizer` and `overlap-optimizer`
write it with this.

The gradients of a stage that lives in DRAM are offloaded after its last backward and used there. Values in DRAM are in
an arena, where a place is used again only after the `free` of its value: so the text decides what may run at the
same time. `Timing` says how far apart offload and step are, and how many buffers of states from SSD there are; `script`
gives each op its slot between the offloads (Fuyou 4.3: prefetch, delayed write-back).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import WORLD, Program, norm_device, place_frees
from ..phases import phases
from ..sharding.gradient_sums import short, sum_once
from .free_later import free_gradients_later
from .timing import Timing, Updates

UpdateStep = tuple[str, str]  # "read", "step" or "write", and the stage


def write_updates(programs: Sequence[Program], hardware: Hardware, updates: Updates, timings: Sequence[Timing]) -> None:
    """Write the updates into all programs of a draft, each with its timing; `hardware`: the devices they run on."""
    interface = programs[0].interface
    if updates.groups:
        interface = replace(interface, groups={**interface.groups, **updates.groups})
    for program in programs:
        program.interface = interface
    for program, timing in zip(programs, timings):
        _Writer(program, updates, timing).write()
    free_gradients_later(programs, hardware)


@dataclass(frozen=True)
class Script:
    """The places of the updates of one program's swapped stages. `order`: the stages as their gradients come; `begin`:
    the op before which slot 0 is. Slot i is after the offload of the i-th stage, the last slot but one after the last
    backward, and the last slot after the norm."""

    order: list[str]
    slots: list[list[UpdateStep]]
    begin: fx.Node | None


def script(program: Program, updates: Updates, timing: Timing) -> Script:
    """The script of a program whose results hold the gradients."""
    grads = _gradients(program)
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    swapped = [stage for stage in grads if updates.where[stage] != ops.DEVICE]
    order = sorted(swapped, key=lambda stage: position[grads[stage]])
    late = [stage for stage in order if updates.is_late(stage)]
    if not updates.overlap:
        late.reverse()  # the stream is in order: none is stepped before the last gradients have come
    on_ssd = [stage for stage in order if updates.where[stage] == ops.SSD]
    begin = None
    if order:
        begin = next(phase.nodes[0] for phase in reversed(phases(program)) if phase.stage == order[0])
    return Script(order, slots(order, late, on_ssd, timing), begin)


def slots(order: Sequence[str], late: Sequence[str], on_ssd: Sequence[str], timing: Timing) -> list[list[UpdateStep]]:
    """The moves of each slot. States are read when a buffer is free, and no more stages early than there are buffers;
    they are written back after their step, which frees their buffer."""
    last = len(order) + 2
    at = {stage: min(i + timing.lag, last - 1) for i, stage in enumerate(order, 1)} | dict.fromkeys(late, last)
    steps = [stage for stage in order if stage not in late] + list(late)
    reads = [stage for stage in steps if stage in set(on_ssd)]
    following = dict(zip(reads, reads[timing.buffers :]))
    found: list[list[UpdateStep]] = [[] for _ in range(last + 1)]
    for stage in reads[: timing.buffers]:
        found[max(0, at[stage] - timing.buffers)].append(("read", stage))
    for stage in steps:
        found[at[stage]].append(("step", stage))
        if stage in on_ssd:
            found[at[stage]].append(("write", stage))
        if stage in following:
            other = following[stage]
            found[max(at[stage], at[other] - timing.buffers)].append(("read", other))
    return found


def _gradients(program: Program) -> dict[str, fx.Node]:
    return {str(n.meta["type"].stage): n for n in program.results().get("grads", [])}


class _Writer:
    """Writes the update part of one program."""

    def __init__(self, program: Program, updates: Updates, timing: Timing):
        self.program, self.updates = program, updates
        self.grads = _gradients(program)
        self.script = script(program, updates, timing)
        self.weights_on_ssd = stages_read(program)
        self.states: dict[str, fx.Node] = {}
        self.norm: fx.Node | None = None

    def write(self) -> None:
        graph, order, moves = self.program.graph, self.script.order, self.script.slots
        results = self.program.results()
        results.pop("grads", None)
        self.program.returns(results)
        output = graph.output_node()
        for stage, value in self.grads.items():
            self.grads[stage] = self.collect(stage, value)
            if stage not in self.updates.tied_stages:
                self.hook(stage)
        if self.script.begin is not None:
            with graph.inserting_before(self.script.begin):
                self.make(moves[0])
        for stage, own in zip(order, moves[1:]):
            with graph.inserting_before(self.grads[stage].next):
                self.make(own)
        with graph.inserting_before(output):
            self.make(moves[-2])
            self.reduce_ties()
            for stage in self.grads:
                if stage in self.updates.tied_stages:
                    self.hook(stage)
            if self.updates.max_norm is not None:
                self.norm = self.total_norm()
            for stage in self.grads:
                if stage not in order:
                    self.step(stage)
            self.make(moves[-1])
            for stage in order:
                self.redo(stage)
        place_frees(self.program)

    def collect(self, stage: str, grads: fx.Node) -> fx.Node:
        """Sum a stage's gradients over the lanes right after its last backward; offload those of a swapped stage."""
        if not grads.meta["type"].group:  # otherwise `insert-two-hop` has summed them
            grads = sum_once(self.program, grads)
        if stage in self.script.order:
            with self.program.graph.inserting_before(grads.next):
                (grads,) = self.program.emit(ops.offload, grads, names=[f"{short('g', stage)}_dram"])
        return grads

    def hook(self, stage: str) -> None:
        """Run gradient hooks after the last op on a stage's gradients."""
        if self.program.interface.stages[stage].has_hooks:
            grads = self.grads[stage]
            with self.program.graph.inserting_before(grads.next):
                (self.grads[stage],) = self.program.emit(ops.hook, grads, names=[f"{short('g', stage)}_hooked"])

    def make(self, moves: Sequence[UpdateStep]) -> None:
        for kind, stage in moves:
            what = f"{stage}.{'all' if stage in self.weights_on_ssd else 'states'}"
            if kind == "read":
                group = {"group": ops.SHARDS} if self.program.interface.shards > 1 else {}
                (self.states[stage],) = self.program.emit(ops.read, what, names=[short("states", stage)], **group)
            elif kind == "write":
                self.program.emit(ops.write, self.states[stage], to=what)
            else:
                self.step(stage)

    def step(self, stage: str) -> None:
        """Step a stage, with its states if they came from SSD, before the norm is known or on clipped gradients."""
        grads, fields = self.grads[stage], dict[str, Any]()
        early = stage in self.script.order and not self.updates.is_late(stage)
        if self.updates.max_norm is not None and early:
            fields["speculative"] = True
        elif self.norm is not None:
            names, max_norm = [f"{short('g', stage)}_clipped"], self.updates.max_norm
            (grads,) = self.program.emit(ops.clip, grads, self.norm, names=names, max_norm=max_norm)
        norm = [self.norm] if self.updates.scaled and not early else []
        if stage not in self.states:
            self.program.emit(ops.step, stage, grads, *norm, **fields)
            return
        names = [f"{short('states', stage)}_new"]
        (self.states[stage],) = self.program.emit(
            ops.step, stage, grads, *norm, states=self.states[stage], names=names, **fields
        )

    def redo(self, stage: str) -> None:
        if self.norm is not None and not self.updates.is_late(stage):
            max_norm = self.updates.max_norm
            self.program.emit(ops.redo, stage, self.grads[stage], self.norm, max_norm=max_norm)

    def reduce_ties(self) -> None:
        for group, rows in self.updates.groups.items():
            mine = [stage for device, stage, _ in rows if device == self.program.device and stage]
            if not mine:
                continue
            names = [f"{short('g', stage)}_summed" for stage in mine]
            reduced = self.program.emit(ops.all_reduce, *(self.grads[s] for s in mine), names=names, group=group)
            self.grads.update(zip(mine, reduced))

    def total_norm(self) -> fx.Node:
        """The sum of squares over all devices, whatever memory has their gradients; a stage that several devices run
        counts on the first of them."""
        interface, device = self.program.interface, self.program.device
        mine = [g for stage, g in self.grads.items() if norm_device(interface, stage, device) == device]
        (own,) = self.program.emit(ops.norm, *mine, names=["norm"])
        if WORLD not in self.updates.groups:  # every device has all gradients
            return own
        (total,) = self.program.emit(ops.all_reduce, own, names=["norm_world"], group=WORLD)
        return total


def stages_read(program: Program) -> set[str]:
    """The stages whose weights a program reads from SSD."""
    names = [n.args[0] for n in program.ops() if n.target is ops.read and isinstance(n.args[0], str)]
    return {name.partition(".")[0] for name in names if name.endswith(".weights")}
