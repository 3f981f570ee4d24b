"""Memory of a program, counted in issue order: the same rules for the verifier, the passes and the runtimes.

Each memory holds, added up:
- what persists across steps (`persistent_bytes`): on a device, resident weights with their optimizer states,
  buffers, and CUDA graphs; in DRAM and on SSD, the weights and states that live there;
- an arena: one preallocated block in which values have planned places (`plan_arena`): on a device, fetched and gathered
  weights, scattered gradients, and the workspace of gathers and scatters; in DRAM, values that were read or offloaded;
  on SSD, activations that were written;
- every other live value, and the workspace of the op that runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import fx

from .. import ops
from ..calls import op_of
from ..errors import BudgetExceeded
from ..stages.interface import Interface
from ..stages.stage import PAGE, aligned
from ..units import format_bytes
from .graphs import graph_bytes
from .places import ArenaPlaces
from .program import Program, donated_operands, producer_of, values_of, work_of

ON_DEVICE = ("weights", "part", "shard")  # the kinds of value in a device's arena, beside gradients of a shard


@dataclass(frozen=True)
class Persistent:
    """Bytes that one device's program holds across steps, per memory and by what they are."""

    device: dict[str, int]
    dram: dict[str, int]
    ssd: dict[str, int]

    def parts(self, memory: str) -> dict[str, int]:
        return {ops.DEVICE: self.device, ops.DRAM: self.dram, ops.SSD: self.ssd}[memory]

    def total(self, memory: str) -> int:
        return sum(self.parts(memory).values())


@dataclass(frozen=True)
class StageHome:
    """The home of one stage: the memory of its weights, and of its states if the program updates it. `group`: if it is
    given, only a shard of the weights is here. `undo`: what an update changes is kept a second time."""

    weights: str
    states: str | None = None
    group: str = ""
    undo: bool = False


def homes_of(program: Program) -> dict[str, StageHome]:
    """The home of each stage of a program, from its ops. See `ops/transfers.py`."""
    return program.once(_homes)


def _homes(program: Program) -> dict[str, StageHome]:
    homes: dict[str, StageHome] = {}
    for node in program.ops():
        memory = op_of(node).persists_in
        if memory and isinstance(node.args[0], str):
            stage, _, what = node.args[0].partition(".")
            if what != "states":
                homes.setdefault(stage, StageHome(memory, group=str(node.kwargs.get("group") or "")))
        elif node.target is ops.step and node.args[0] in homes:
            home = homes[str(node.args[0])]
            states = home.weights if ops.step.bind(node.args, node.kwargs)["states"] is None else ops.SSD
            if program.interface.stages[str(node.args[0])].staying:
                states = ops.DEVICE
            homes[str(node.args[0])] = replace(home, states=states, undo=bool(node.kwargs.get("speculative")))
    return homes


def persistent_bytes(program: Program) -> Persistent:
    """Bytes that stay: each stage's weights, fp32 masters, optimizer states and buffers, where the program has them.

    What a speculative update changes counts a second time, because the update may be undone; so do buffers that forward
    changes, for a step that may be undone. On the device also what CUDA graphs hold.
    """
    found, in_graphs = bytes_of_homes(program.interface, homes_of(program)), graph_bytes(program)
    if in_graphs:
        found.device["graphs"] = in_graphs
    return found


def bytes_of_homes(interface: Interface, homes: Mapping[str, StageHome]) -> Persistent:
    """Bytes that stay of stages with these homes, on one device and in its host's memories."""
    where = {memory: _empty() for memory in ops.MEMORIES}
    for stage, home in homes.items():
        spec = interface.part_of(stage, home.group)
        own = where[home.weights]
        own["weights"] += aligned(spec.weight_bytes, PAGE) if home.weights == ops.SSD else spec.weight_bytes
        where[ops.DEVICE]["weights"] += spec.staying_bytes
        where[ops.DEVICE]["buffers"] += sum(aligned(b.bytes) for b in spec.buffers)
        noted = spec.noted_buffers(undo=not interface.asynchronous)
        where[ops.DEVICE]["undo"] += sum(aligned(b.bytes) for b in spec.buffers if b.name in noted)
        if home.states is None:
            continue
        own = where[home.states]
        masters, states = interface.master_bytes(spec), interface.state_bytes(spec)
        if home.states == ops.SSD:  # pages of files, whose ends are padded
            states = interface.states_bytes(spec) - masters
        own["masters"] += masters
        own["states"] += states
        if home.undo and home.states == ops.SSD:
            own["undo"] += masters + states + (spec.weight_bytes if home.weights == ops.SSD else 0)
            kind = "all" if home.weights == ops.SSD else "states"
            where[ops.DRAM]["undo"] += interface.copied_to_undo(spec, kind)
        elif home.undo:
            own["undo"] += interface.copied_to_undo(spec)
    return Persistent(where[ops.DEVICE], where[ops.DRAM], where[ops.SSD])


def _empty() -> dict[str, int]:
    return {"weights": 0, "masters": 0, "states": 0, "undo": 0, "buffers": 0}


class ArenaPlan(NamedTuple):
    """The arena of a memory: the offset of each value that has a place in it, its size, and the offset of each op's
    workspace in it."""

    offsets: dict[fx.Node, int]
    bytes: int
    staging: dict[fx.Node, int]


def plan_arena(program: Program, memory: str = ops.DEVICE) -> ArenaPlan:
    """The places in a memory's arena (`places.py`), by issue order."""
    return plan_arenas(program)[memory]


def plan_arenas(program: Program) -> dict[str, ArenaPlan]:
    """The places in the arena of each memory."""
    arenas = {memory: ArenaPlaces(512 if memory == ops.DEVICE else PAGE) for memory in ops.MEMORIES}
    home: dict[fx.Node, str] = {}
    device = arenas[ops.DEVICE]
    staging: dict[fx.Node, tuple[str, fx.Node]] = {}
    for node in program.ops():
        if node.target is ops.free:
            for place in (place for value in node.all_input_nodes for place in places_of(value)):
                if place in home:
                    arenas[home[place]].give(place)
        elif takes_place(node):
            memory = home[node] = node.meta["type"].memory
            arenas[memory].take(node, place_bytes(node), next(iter(_parts_before(node)), None))
        if op_of(node).workspace_in_arena:
            staging[node] = ("staging", node)
            device.take(staging[node], work_of(program, node).workspace_bytes)
            device.give(staging[node])
    offsets = {memory: arena.offsets.offsets for memory, arena in arenas.items()}
    return {
        memory: ArenaPlan(
            {node: offsets[memory][node] for node, at in home.items() if at == memory},
            arena.bytes,
            {node: offsets[memory][key] for node, key in staging.items()} if memory == ops.DEVICE else {},
        )
        for memory, arena in arenas.items()
    }


def takes_place(node: fx.Node, memory: str | None = None) -> bool:
    """Whether an op brings a value into the arena of `memory`, or, without one, of any memory."""
    if not op_of(node).result_in_arena:
        return False
    kind = node.meta.get("type")
    if not isinstance(kind, ops.Value) or (memory is not None and kind.memory != memory):
        return False
    if kind.memory == ops.DEVICE and kind.kind in ON_DEVICE:
        return True
    if node.target is ops.reduce_scatter:
        return _total_of(node) is None and not _is_returned(node)
    return kind.memory != ops.DEVICE and not _is_returned(node)


def _is_returned(value: fx.Node) -> bool:
    """Whether a value is a result of the step; results are handed out, so they are in no arena."""
    return any(user.op == "output" for user in value.users)


def _total_of(scatter: fx.Node) -> fx.Node | None:
    """The sum that a `reduce_scatter` adds to, where there is one."""
    total = ops.reduce_scatter.bind(scatter.args, scatter.kwargs)["total"]
    return total if isinstance(total, fx.Node) else None


def places_of(value: fx.Node) -> list[fx.Node]:
    """The ops that took the places of a value: none if it is in no arena, two if weights came in two parts, else one. A
    value that takes over another in place has the same places."""
    producer = producer_of(value)
    scatters = producer.target is ops.reduce_scatter
    if takes_place(producer):
        return [producer] if scatters else [*donated_operands(producer), producer]
    kind = value.meta["type"]
    if kind.kind == "norm" or (kind.memory == ops.DEVICE and not kind.group):
        return []
    before = [total for total in (_total_of(producer),) if total] if scatters else donated_operands(producer)
    return places_of(before[values_of(producer).index(value)]) if before else []


def place_bytes(node: fx.Node) -> int:
    """Bytes of the place that an op takes: its value, without the part that was fetched before."""
    return int(node.meta["type"].bytes - sum(part.meta["type"].bytes for part in _parts_before(node)))


def _parts_before(node: fx.Node) -> list[fx.Node]:
    """The parts of an op's value that were fetched before it."""
    return [value for value in donated_operands(node) if value.meta["type"].kind == "part"]


@dataclass
class MemoryProfile:
    """Peak bytes per memory of one program, the op at which each is reached, and device bytes at every op; the places
    in its arenas, and the work of its ops, from which these follow."""

    peak_bytes: dict[str, int]
    peak_at: dict[str, fx.Node | None]
    plans: dict[str, ArenaPlan]
    persistent: Persistent
    work_of: dict[fx.Node, ops.Work] = field(default_factory=dict)
    live_bytes: dict[fx.Node, int] = field(default_factory=dict)  # device memory while the op runs
    live_values: dict[str, dict[str, int]] = field(default_factory=dict)  # at each memory's peak

    @property
    def arenas(self) -> dict[str, int]:
        """Bytes of the arena of each memory."""
        return {memory: plan.bytes for memory, plan in self.plans.items()}

    @property
    def arena_bytes(self) -> int:
        """Bytes of the device's arena."""
        return self.plans[ops.DEVICE].bytes


def profile_memory(program: Program) -> MemoryProfile:
    """Walk the program in issue order (types must be inferred) and find the peak of each memory. Nobody changes the
    result but with the program."""
    return program.once(_profile)


def _profile(program: Program) -> MemoryProfile:
    persistent = persistent_bytes(program)
    plans = plan_arenas(program)
    now = {memory: persistent.total(memory) + plans[memory].bytes for memory in ops.MEMORIES}
    result = MemoryProfile(dict(now), dict.fromkeys(ops.MEMORIES), plans, persistent)
    result.live_values = {memory: {} for memory in ops.MEMORIES}
    account: dict[str, dict[str, int]] = {memory: {} for memory in ops.MEMORIES}
    for node in program.ops():
        gone = node.all_input_nodes if node.target is ops.free else donated_operands(node)
        for value in gone:
            memory = value.meta["type"].memory
            now[memory] -= account[memory].pop(value.name, 0)
        if node.target is ops.free:
            result.live_bytes[node], result.work_of[node] = now[ops.DEVICE], work_of(program, node)
            continue
        for value in values_of(node):
            kind = value.meta["type"]
            if kind.owned and not places_of(value):
                account[kind.memory][value.name] = kind.bytes
                now[kind.memory] += kind.bytes
        work = result.work_of[node] = work_of(program, node)
        workspace_bytes = 0 if op_of(node).workspace_in_arena else work.workspace_bytes
        result.live_bytes[node] = now[ops.DEVICE] + (workspace_bytes if work.workspace_memory == ops.DEVICE else 0)
        for memory, taken in now.items():
            if memory == work.workspace_memory:
                taken += workspace_bytes
            if taken > result.peak_bytes[memory]:
                result.peak_bytes[memory] = taken
                result.peak_at[memory] = node
                result.live_values[memory] = dict(account[memory])
    return result


class Account:
    """Bytes taken from one memory with a fixed budget; taking more than is left raises `BudgetExceeded`."""

    def __init__(self, memory: str, budget_bytes: int):
        self.memory = memory
        self.budget_bytes = budget_bytes
        self.live: dict[str, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def take(self, name: str, num_bytes: int, op: str = "") -> None:
        """Charge `num_bytes` under `name`. Raises `BudgetExceeded` with the op and the live values."""
        if self.live_bytes + num_bytes > self.budget_bytes:
            raise BudgetExceeded(budget_excess_text(self.memory, self.budget_bytes, num_bytes, name, op, self.live))
        self.live[name] = self.live.get(name, 0) + num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def give(self, name: str) -> None:
        self.live_bytes -= self.live.pop(name)


def budget_excess_text(
    memory: str, budget_bytes: int, need_bytes: int, name: str, op: str, live: Mapping[str, int]
) -> str:
    """The text of an exceeded budget: the op, what it needs, and the largest live values."""
    used = sum(live.values())
    missing = used + need_bytes - budget_bytes
    return (
        f"{memory}: {name} needs {format_bytes(need_bytes)}, but {format_bytes(used)} of {format_bytes(budget_bytes)} "
        f"are taken{f' at `{op}`' if op else ''}; missing {format_bytes(missing)}. Live values:\n{largest_values(live)}"
    )


def largest_values(live: Mapping[str, int], num_rows: int = 8) -> str:
    """One line per value, the largest first."""
    largest = sorted(live.items(), key=lambda item: -item[1])[:num_rows]
    rows = "\n".join(f"    {format_bytes(size):>10}  {value}" for value, size in largest)
    return rows + (f"\n    and {len(live) - len(largest)} more" if len(live) > len(largest) else "")
