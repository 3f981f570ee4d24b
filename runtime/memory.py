"""Memory of a program, counted in issue order: the same rules for the verifier, the passes and the runtimes.

A device's memory holds, added up:
- what persists across steps (`persistent_bytes`): resident weights and their optimizer states, buffers;
- the arena: one preallocated block in which fetched weights live (`plan_arena` gives each its offset);
- every other live value, and the workspace of the op that runs.
DRAM holds swapped stages (weights, fp32 masters, optimizer states), offloaded gradients, and the workspace of their
update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from . import ops
from .errors import BudgetExceeded
from .program import Program, StageSpec, aligned, donated, values_of, work_of
from .units import format_bytes

IN_ARENA = (ops.fetch, ops.all_gather)  # ops whose results lie in the arena


@dataclass(frozen=True)
class Persistent:
    """Bytes that one device's program holds across steps, per memory and by what they are."""

    device: dict[str, int]
    dram: dict[str, int]

    def total(self, memory: str) -> int:
        return sum((self.device if memory == ops.DEVICE else self.dram).values())


def persistent_bytes(program: Program) -> Persistent:
    """What stays: per stage its weights, fp32 master copies, optimizer states and buffers, where the program has them.

    A stage whose weights are `resident` lies on the device; one that is fetched lies in DRAM, with its states; one that
    is fetched as a shard lies there as this shard.
    """
    face = program.interface
    where = {ops.DEVICE: _empty(), ops.DRAM: _empty()}
    homes: dict[str, str] = {}
    parts: dict[str, StageSpec] = {}
    stepped = set()
    for node in program.ops():
        if node.target in (ops.resident, ops.fetch):
            stage = str(node.args[0]).partition(".")[0]
            homes.setdefault(stage, ops.DEVICE if node.target is ops.resident else ops.DRAM)
            parts[stage] = face.part_of(stage, str(node.kwargs.get("group") or ""))
        elif node.target is ops.step:
            stepped.add(node.args[0])
    for stage, memory in homes.items():
        spec = parts[stage]
        where[memory]["weights"] += spec.weight_bytes
        where[ops.DEVICE]["buffers"] += sum(aligned(b.bytes) for b in spec.buffers)
        if stage in stepped:
            where[memory]["masters"] += 4 * spec.trained_params if face.master else 0
            where[memory]["states"] += int(face.state_bytes_per_param * spec.trained_params)
    return Persistent(where[ops.DEVICE], where[ops.DRAM])


def _empty() -> dict[str, int]:
    return {"weights": 0, "masters": 0, "states": 0, "buffers": 0}


def plan_arena(program: Program) -> tuple[dict[fx.Node, int], int]:
    """Offset of what each fetch or gather brings into the device's arena (first fit, in issue order), and its bytes."""
    offsets: dict[fx.Node, int] = {}
    live: list[tuple[int, int, fx.Node]] = []  # (offset, end, fetch), sorted by offset
    size = 0
    for node in program.ops():
        if node.target in IN_ARENA:
            need = aligned(fetched_bytes(node))
            offset = 0
            for start, end, _ in live:
                if offset + need <= start:
                    break
                offset = max(offset, end)
            offsets[node] = offset
            live.append((offset, offset + need, node))
            live.sort(key=lambda row: row[0])
            size = max(size, offset + need)
        elif node.target is ops.free:
            gone = {part for value in node.all_input_nodes for part in fetches_of(value)}
            live = [row for row in live if row[2] not in gone]
    return offsets, size


def fetches_of(value: fx.Node) -> list[fx.Node]:
    """What brought a value into the arena, in order: a gather, or a fetch, or two where it came in parts; else none."""
    if value.target not in IN_ARENA:
        return []
    return [*donated(value), value]


def fetched_bytes(node: fx.Node) -> int:
    """What one fetch moves: its value without the part that was there."""
    return node.meta["type"].bytes - sum(part.meta["type"].bytes for part in donated(node))


@dataclass
class MemoryProfile:
    """Peak bytes per memory of one program, the op at which each is reached, and device bytes after every op."""

    peak_bytes: dict[str, int]
    peak_at: dict[str, fx.Node | None]
    arena_bytes: int
    persistent: Persistent
    live_bytes: dict[fx.Node, int] = field(default_factory=dict)  # device memory while the op runs
    live_values: dict[str, dict[str, int]] = field(default_factory=dict)  # at each memory's peak


def profile_memory(program: Program) -> MemoryProfile:
    """Walk the program in issue order (types must be inferred) and find the peak of each memory."""
    persistent = persistent_bytes(program)
    arena = plan_arena(program)[1]
    base = {ops.DEVICE: persistent.total(ops.DEVICE) + arena, ops.DRAM: persistent.total(ops.DRAM)}
    result = MemoryProfile(dict(base), {ops.DEVICE: None, ops.DRAM: None}, arena, persistent)
    result.live_values = {ops.DEVICE: {}, ops.DRAM: {}}
    account = {ops.DEVICE: dict[str, int](), ops.DRAM: dict[str, int]()}
    now = dict(base)
    for node in program.ops():
        if node.target is ops.free:
            for value in node.all_input_nodes:
                memory = value.meta["type"].memory
                now[memory] -= account[memory].pop(value.name, 0)
            result.live_bytes[node] = now[ops.DEVICE]
            continue
        for value in donated(node):
            memory = value.meta["type"].memory
            now[memory] -= account[memory].pop(value.name, 0)
        for value in values_of(node):
            kind = value.meta["type"]
            if kind.owned and node.target not in IN_ARENA:
                account[kind.memory][value.name] = kind.bytes
                now[kind.memory] += kind.bytes
        work = work_of(program, node)
        extra = {ops.DEVICE: 0, ops.DRAM: 0, work.workspace_memory: work.workspace_bytes}
        result.live_bytes[node] = now[ops.DEVICE] + extra[ops.DEVICE]
        for memory, taken in now.items():
            if taken + extra[memory] > result.peak_bytes[memory]:
                result.peak_bytes[memory] = taken + extra[memory]
                result.peak_at[memory] = node
                result.live_values[memory] = dict(account[memory])
    return result


class Account:
    """Bytes taken from one memory with a budget; taking more than is left raises, it never grows."""

    def __init__(self, memory: str, budget_bytes: int):
        self.memory = memory
        self.budget_bytes = budget_bytes
        self.live: dict[str, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    def take(self, name: str, num_bytes: int, op: str = "") -> None:
        """Charge `num_bytes` under `name`. Raises `BudgetExceeded` with the op and the live values."""
        if self.live_bytes + num_bytes > self.budget_bytes:
            raise BudgetExceeded(over_budget(self.memory, self.budget_bytes, num_bytes, name, op, self.live))
        self.live[name] = self.live.get(name, 0) + num_bytes
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def give(self, name: str) -> None:
        self.live_bytes -= self.live.pop(name)


def over_budget(memory: str, budget_bytes: int, need_bytes: int, name: str, op: str, live: Mapping[str, int]) -> str:
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
