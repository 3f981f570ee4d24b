"""The DRAM that a program takes once it has reads from SSD and updates, found without writing these into it.

In: a program whose results hold the gradients. Out: the bytes that `profile_memory` finds after `insert-ssd` and
`overlap-optimizer`. The choice of what SSDs hold tries many ways, and copies of large programs would take minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from ...ir import ops
from ...ir.program import (
    PAGE,
    ArenaPlaces,
    Program,
    StageHome,
    bytes_of_homes,
    homes_of,
    place_bytes,
    places_of,
    takes_place,
)
from ..phases import Phase, phases
from .timing import Timing, Updates
from .updates import script, stages_read

TextPlace = tuple[int, int, int]  # in the text: an op's number, before (-1) or after (1) it, and the rank there
MemoryEvent = tuple[TextPlace, str, int]  # a value comes, or goes (0 bytes)
NORM_BYTES = 16  # of the device's own norm and of that of all devices


@dataclass(frozen=True)
class WeightsRead:
    """Weights of one stage that come from SSD: their fetches to the device, and the op before which they are read."""

    stage: str
    place: fx.Node
    fetches: tuple[fx.Node, ...]


class DramNeed(NamedTuple):
    """Bytes of DRAM at a step's peak; and the homes of stages between steps, with their bytes and those of the
    arena."""

    step_bytes: int
    homes: dict[str, StageHome]
    lasting_bytes: int
    arena_bytes: int


class DramPeak:
    """The DRAM peak of one program, whose text is read once."""

    def __init__(self, program: Program):
        self.program, self.interface = program, program.interface
        self.group = ops.SHARDS if self.interface.shards > 1 else ""
        self.number = {node: i for i, node in enumerate(program.graph.nodes)}
        self.order = phases(program)
        self.grads = {str(n.meta["type"].stage): n for n in program.results().get("grads", [])}
        fetched = (n for n in program.ops() if n.target is ops.fetch and isinstance(n.args[0], str))
        self.in_dram = list(dict.fromkeys(str(n.args[0]).partition(".")[0] for n in fetched))
        self.own = self._own_events()
        self.read_already, self.homes = stages_read(program), homes_of(program)

    def _own_events(self) -> list[MemoryEvent]:
        """The events of what the text moves already."""
        found: list[MemoryEvent] = []
        for node in self.program.ops():
            if takes_place(node, ops.DRAM):
                found.append(((self.number[node], 0, 0), node.name, place_bytes(node)))
            elif node.target is ops.free:
                parts = [part for value in node.all_input_nodes for part in places_of(value)]
                gone = [part for part in parts if part.meta["type"].memory == ops.DRAM]
                found += [((self.number[node], 0, 0), part.name, 0) for part in gone]
        return found

    def bytes(self, updates: Updates, timing: Timing, weights: Collection[str] = (), ahead: int = 0) -> int:
        """The peak if the weights of these stages are read from SSD `ahead` phases before their fetch."""
        return self.need(updates, timing, weights, ahead).step_bytes

    def need(self, updates: Updates, timing: Timing, weights: Collection[str], ahead: int) -> DramNeed:
        """As `bytes`, with what loading is told of this device."""
        on_ssd = self.read_already | set(weights)
        reads = weights_reads(self.program, self.order, self.number, weights, ahead)
        events = self.own + self._weights_events(reads) + self._update_events(updates, timing, on_ssd)
        arena = ArenaPlaces(PAGE)
        for _, name, num_bytes in sorted(events):
            if num_bytes:
                arena.take(name, num_bytes)
            else:
                arena.give(name)
        homes = self._homes(updates, on_ssd)
        lasting_bytes = bytes_of_homes(self.interface, homes).total(ops.DRAM)
        return DramNeed(
            arena.bytes + lasting_bytes + self._working(updates), {**self.homes, **homes}, lasting_bytes, arena.bytes
        )

    def _weights_events(self, reads: Sequence[WeightsRead]) -> list[MemoryEvent]:
        found: list[MemoryEvent] = []
        for i, read in enumerate(reads):
            name = f"weights {i}"
            num_bytes = self.interface.part_of(read.stage, self.group).weight_bytes
            found.append(((self.number[read.place], -1, i), name, num_bytes))
            found.append(((self.number[read.fetches[-1]], 1, i), name, 0))
        return found

    def _update_events(self, updates: Updates, timing: Timing, on_ssd: Collection[str]) -> list[MemoryEvent]:
        made = script(self.program, updates, timing)
        ends: dict[str, TextPlace] = {}
        found: list[MemoryEvent] = []
        numbers = [self.number[made.begin] if made.begin is not None else 0]
        numbers += [self.number[self.grads[stage]] for stage in made.order]
        last = len(self.number)
        for i, moves in enumerate(made.slots):
            number = numbers[i] if i < len(numbers) else last + i
            side = -1 if i == 0 else 1
            for j, (kind, stage) in enumerate(moves):
                place = (number, side, last + j)  # after the weights that are read there
                spec = self.interface.part_of(stage, self.group)
                if kind == "read":
                    size = self.interface.all_bytes(spec) if stage in on_ssd else self.interface.states_bytes(spec)
                    found.append((place, f"states of {stage}", size))
                elif kind == "write":
                    found.append((place, f"states of {stage}", 0))
                else:
                    ends[stage] = place
        for stage in made.order:
            value = f"gradients of {stage}"
            end = (last + len(made.slots), 0, 0) if self._is_speculative(updates, stage) else ends[stage]
            begin = (self.number[self.grads[stage]], 1, 0)
            found += [(begin, value, self._grad_bytes(stage)), (end, value, 0)]
        return found

    def _homes(self, updates: Updates, on_ssd: Collection[str]) -> dict[str, StageHome]:
        """The homes, between steps, of the stages that are not on the device."""
        homes = {}
        for stage in dict.fromkeys([*self.in_dram, *on_ssd]):
            states = updates.where[stage] if stage in self.grads else None
            undo = self._is_speculative(updates, stage)
            homes[stage] = StageHome(ops.SSD if stage in on_ssd else ops.DRAM, states, self.group, undo)
        return homes

    def _working(self, updates: Updates) -> int:
        """The bytes that an update on the CPU takes while it runs."""
        context = ops.Context(self.interface, self.program.device)
        most = 0
        for stage in self.grads:
            if updates.where[stage] == ops.DEVICE:
                continue
            value = ops.Value("grads", self._grad_bytes(stage), ops.DRAM, stage=stage, group=self.group)
            most = max(most, ops.step.work(context, stage, value).workspace_bytes)
            if self._is_speculative(updates, stage):
                again = ops.redo.work(context, stage, value, value, max_norm=0.0)
                most = max(most, again.workspace_bytes)
        return most + (NORM_BYTES if updates.max_norm is not None else 0)

    def _is_speculative(self, updates: Updates, stage: str) -> bool:
        return stage in self.grads and updates.max_norm is not None and not updates.is_late(stage)

    def _grad_bytes(self, stage: str) -> int:
        return self.interface.part_of(stage, self.group).grad_bytes


def weights_reads(
    program: Program, order: Sequence[Phase], number: Mapping[fx.Node, int], stages: Collection[str], ahead: int
) -> list[WeightsRead]:
    """One read per fetch of a stage's weights, at the start of the phase that is `ahead` phases before the fetch."""
    starts = [number[phase.nodes[0]] for phase in order]
    found: list[WeightsRead] = []
    wanted = set(stages)
    for node in program.ops() if wanted else ():
        if node.target is not ops.fetch or not isinstance(node.args[0], str):
            continue
        stage = node.args[0].partition(".")[0]
        if stage not in wanted:
            continue
        begun = node.args[1] if len(node.args) > 1 else None
        if begun is not None:  # the rest of weights that came in part
            i = next(i for i, read in enumerate(found) if read.fetches[-1] is begun)
            found[i] = WeightsRead(stage, found[i].place, (*found[i].fetches, node))
            continue
        now = next(i for i, start in enumerate(starts) if start > number[node])
        place = order[max(0, now - ahead)].nodes[0]
        found.append(WeightsRead(stage, place if number[place] < number[node] else node, (node,)))
    return found
