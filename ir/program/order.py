"""The partial order in which all devices' ops run: the ops that each op waits for. The verifier and the simulator share
it.

A task is what happens at one time: an op, a send together with its receive, or all members' calls of a collective.
A task starts when the following have ended:
- the producers of its operands; for what it takes over in place or frees, also the earlier readers;
- the task before it on each of its streams (`free` and `resident` occupy none);
- for an update of a stage, the fetches and reads of the stage before it; for these, the updates before them;
- for an op that takes a place in an arena, the frees of what lay there; for any op that takes memory, the first N
  releases of its own text, where N is the smallest number with which it fits the budget even if no later release has
  happened and everything before it in the text has started. So memory never overflows, whichever stream runs ahead,
  and an op never waits for anything after it in its text. On a GPU the same holds for each pool of its memory and the
  pool's part of the budget (`pools.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from .. import ops
from ..calls import op_of
from .memory import ArenaPlan, MemoryProfile, place_bytes, places_of, plan_arenas, takes_place
from .pools import Pools, pools_of
from .program import Program, donated_operands, operands, producer_of, values_of, work_of


@dataclass(eq=False)
class Task:
    """`parts`: per participating op its device, node and work. `waits`: indices of tasks, each with its reason."""

    parts: list[tuple[int, fx.Node, ops.Work]]
    waits: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class Order:
    """All tasks of a step, and for each op its task and its work.

    Of several steps, the tasks of each follow those of the step before in the same order: `per_step` of them; `task_of`
    has those of the first step.
    """

    tasks: list[Task] = field(default_factory=list)
    task_of: dict[fx.Node, int] = field(default_factory=dict)
    work_of: dict[fx.Node, ops.Work] = field(default_factory=dict)
    per_step: int = 0


@dataclass(frozen=True)
class Memory:
    """The memories of one device's program: its profile, its device's budget, and its part of the host's DRAM if that
    is limited. `pooled`: each stream of the device has memory of its own, as on a GPU. `changes`: what ops take and
    give back of a memory, as far as it was asked."""

    profile: MemoryProfile
    budget_bytes: int
    dram_budget_bytes: int | None = None
    pooled: bool = False
    changes: dict[str, dict[fx.Node, tuple[int, int]]] = field(default_factory=dict, compare=False, repr=False)

    def waits(self, program: Program) -> list[_BudgetWaits]:
        lasting = {
            memory: self.profile.persistent.total(memory) + self.profile.arenas[memory] for memory in ops.MEMORIES
        }
        spare_bytes = self.budget_bytes - lasting[ops.DEVICE]
        found: list[_BudgetWaits] = []
        pools = pools_of(program) if self.pooled else None
        shares = {} if pools is None else pools.shares(spare_bytes)
        found += [_PoolWaits(pools, pool, most) for pool, most in shares.items() if pools is not None]
        if pools is None or sum(shares.values()) > spare_bytes:  # else the shares keep to it
            found.append(_BudgetWaits(ops.DEVICE, spare_bytes, self.changes.setdefault(ops.DEVICE, {})))
        if self.dram_budget_bytes is not None:
            spare_bytes = self.dram_budget_bytes - lasting[ops.DRAM]
            found.append(_BudgetWaits(ops.DRAM, spare_bytes, self.changes.setdefault(ops.DRAM, {})))
        return found


def build_order(
    programs: Sequence[Program],
    memories: Mapping[int, Memory],
    steps: int = 1,
    known: Mapping[fx.Node, ops.Work] | None = None,
) -> Order:
    """The order of programs whose types are inferred and whose messages match, or of one program alone.

    Devices without an entry in `memories`, which have the profiles of these very programs but for the order of
    receives, wait for a place in their arena only. `steps`: how many times the programs
    run, one right after another; what a step returned is given back before the next one. A task waits for tasks of its
    own step and of steps before it, and in each step for the same ones of its own. So several steps have no ring of
    waits if one has none, and they keep to the memories for the same reason as one does. `known`: the work of ops.
    """
    order = Order()
    if known is None and all(program.device in memories for program in programs):
        known = {n: w for program in programs for n, w in memories[program.device].profile.work_of.items()}
    _create_tasks(programs, order, known)
    order.per_step = len(order.tasks)
    for _ in range(1, steps):
        order.tasks += [Task(task.parts) for task in order.tasks[: order.per_step]]
    for program in programs:
        _Device(program, order).connect(memories.get(program.device), steps)
    return order


def join_orders(programs: Sequence[Program], alone: Sequence[Order]) -> Order:
    """The order of programs that `build_order` gives for one step, out of the order of each program alone: for a
    program that changed, its own order is all that must be built again."""
    order = Order()
    _create_tasks(programs, order, {node: work for own in alone for node, work in own.work_of.items()})
    order.per_step = len(order.tasks)
    for own in alone:
        place = [order.task_of[task.parts[0][1]] for task in own.tasks]
        for at, task in zip(place, own.tasks):
            order.tasks[at].waits += [(place[other], why) for other, why in task.waits]
    return order


def find_cycle(order: Order) -> list[tuple[int, str]] | None:
    """Tasks that wait for each other in a ring, each with the reason it waits for the next; None when all can run."""
    blocked_by = [len(task.waits) for task in order.tasks]
    followers: list[list[int]] = [[] for _ in order.tasks]
    for index, task in enumerate(order.tasks):
        for other, _ in task.waits:
            followers[other].append(index)
    ready = [index for index, count in enumerate(blocked_by) if count == 0]
    for index in ready:  # grows while it is walked
        for follower in followers[index]:
            blocked_by[follower] -= 1
            if blocked_by[follower] == 0:
                ready.append(follower)
    stuck = next((index for index, count in enumerate(blocked_by) if count), None)
    if stuck is None:
        return None
    seen: dict[int, int] = {}
    path: list[tuple[int, str]] = []
    while stuck not in seen:
        seen[stuck] = len(path)
        following, why = next((other, why) for other, why in order.tasks[stuck].waits if blocked_by[other])
        path.append((stuck, why))
        stuck = following
    return path[seen[stuck] :]


def _create_tasks(
    programs: Sequence[Program], order: Order, known: Mapping[fx.Node, ops.Work] | None = None
) -> None:
    """`known`: the work of ops, where it is known already."""
    meetings: dict[tuple, int] = {}
    for program in programs:
        device, calls = program.device, dict[str, int]()
        for node in program.ops():
            work = work_of(program, node) if known is None else known[node]
            key: tuple | None = None
            if node.target is ops.send:
                key = (device, work.peer, work.tag)
            elif node.target is ops.recv:
                key = (work.peer, device, work.tag)
            elif work.group:
                calls[work.group] = calls.get(work.group, 0) + 1
                # Lanes are all alike, so the devices of other lanes are not late.
                over_lanes = program.interface.lanes and work.group in ops.LANE_GROUPS
                key = None if over_lanes else (work.group, calls[work.group])
            index = len(order.tasks) if key is None else meetings.setdefault(key, len(order.tasks))
            if index == len(order.tasks):
                order.tasks.append(Task([]))
            order.tasks[index].parts.append((device, node, work))
            order.task_of[node] = index
            order.work_of[node] = work


class _Device:
    """Adds the waits of one program's ops, in one walk over its text for each step."""

    def __init__(self, program: Program, order: Order):
        self.program = program
        self.tasks = order.tasks
        self.task_of = order.task_of
        self.work_of = order.work_of
        self.last_on: dict[str, int] = {}  # per stream the last task
        self.readers: dict[fx.Node, list[int]] = {}  # per value, the tasks walked over so far that read it
        self.fetches: dict[str, list[int]] = {}  # per stage, since its last update
        self.updated: dict[str, int] = {}  # per stage
        self.stepped: dict[str, int] = {}  # per stage, as `updated`, without writes to SSD
        self.first = 0  # the first task of the step that is walked over

    def connect(self, memory: Memory | None, steps: int = 1) -> None:
        plans = plan_arenas(self.program) if memory is None else memory.profile.plans
        arenas = [_ArenaWaits(plan, name) for name, plan in plans.items() if plan.bytes]
        budgets = [] if memory is None else memory.waits(self.program)
        per_step = len(self.tasks) // steps
        for step in range(steps):
            self.first, self.readers = step * per_step, {}
            for budget in budgets:
                budget.begin()
            self.walk(arenas, budgets)

    def walk(self, arenas: Sequence[_ArenaWaits], budgets: Sequence[_BudgetWaits]) -> None:
        for node in self.program.ops():
            index, work = self.first + self.task_of[node], self.work_of[node]
            self.wait_for_values(node, index)
            self.wait_for_stream(node, index, work)
            self.wait_for_weights(node, index)
            for arena in arenas:
                for other in arena.visit(node, index, work):
                    self.wait(index, other, "its part of the arena is still taken")
            for budget in budgets:
                for other in budget.visit(node, index, work):
                    self.wait(index, other, f"{budget.memory} memory must be given back first")

    def wait(self, index: int, other: int, why: str) -> None:
        if index != other:
            self.tasks[index].waits.append((other, why))

    def wait_for_values(self, node: fx.Node, index: int) -> None:
        read = operands(node)
        gone = read if node.target is ops.free else donated_operands(node)
        for value in read:
            self.wait(index, self.first + self.task_of[producer_of(value)], f"needs `{value.name}`")
            self.readers.setdefault(value, []).append(index)
        for value in gone:
            for reader in self.readers[value]:
                self.wait(index, reader, f"`{value.name}` is still read")

    def wait_for_stream(self, node: fx.Node, index: int, work: ops.Work) -> None:
        if not op_of(node).streams:
            return
        before = self.last_on.get(work.stream)
        if before is not None:
            self.wait(index, before, f"follows on stream {work.stream}")
        self.last_on[work.stream] = index

    def wait_for_weights(self, node: fx.Node, index: int) -> None:
        """A reader of a stage's persistent state waits for the updates before it, and an update for earlier readers."""
        if op_of(node).persists_in in (ops.DRAM, ops.SSD) and isinstance(node.args[0], str):
            stage = node.args[0].partition(".")[0]
            if self.program.interface.stages[stage].staying:  # what is fetched is never updated
                return
            self.fetches.setdefault(stage, []).append(index)
            updates = self.updated if op_of(node).persists_in == ops.SSD else self.stepped
            if stage in updates:
                self.wait(index, updates[stage], f"{stage} is updated first")
            return
        for value in operands(node):
            stage = value.meta["type"].stage
            if value.target is ops.resident and stage in self.updated and node.target is not ops.free:
                self.wait(index, self.updated[stage], f"{stage} is updated first")
        if node.target is ops.all_gather and operands(node)[0].target is ops.resident:
            self.fetches.setdefault(node.meta["type"].stage, []).append(index)
        changed = updated_stage(node)
        if changed is None:
            return
        for other in self.fetches.pop(changed, []):
            self.wait(index, other, f"the weights of {changed} are still being read")
        if changed in self.updated:
            self.wait(index, self.updated[changed], f"{changed} is updated before")
        self.updated[changed] = index
        if node.target is not ops.write:
            self.stepped[changed] = index


def updated_stage(node: fx.Node) -> str | None:
    """The stage whose persistent state an op changes, or None."""
    op = op_of(node)
    named = op.bind(node.args, node.kwargs)[op.updates] if op.updates else None
    return None if named is None else str(named).partition(".")[0]


class _ArenaWaits:
    """An op that takes a place in an arena waits for the frees of everything that overlapped the place before."""

    def __init__(self, plan: ArenaPlan, memory: str):
        self.memory = memory
        self.offsets, self.staging = plan.offsets, plan.staging
        self.given_back: list[tuple[int, int, int]] = []  # (offset, end, task of the free)

    def visit(self, node: fx.Node, index: int, work: ops.Work) -> list[int]:
        found: list[int] = []
        if node.target is ops.free and self.offsets:
            for value in node.all_input_nodes:
                for part in places_of(value) if value.meta["type"].memory == self.memory else ():
                    self.given_back.append((*self.place(part), index))
        if node in self.offsets:
            found += self.take(*self.place(node))
        if node in self.staging:
            start, end = self.staging[node], self.staging[node] + work.workspace_bytes
            found += self.take(start, end)
            self.given_back.append((start, end, index))
        return found

    def take(self, start: int, end: int) -> list[int]:
        """The tasks that free what overlaps this place."""
        found = [task for first, last, task in self.given_back if first < end and start < last]
        # Places wholly inside this one need not be remembered: whoever comes next waits for this one's free.
        self.given_back = [row for row in self.given_back if not (start <= row[0] and row[1] <= end)]
        return found

    def place(self, value: fx.Node) -> tuple[int, int]:
        return self.offsets[value], self.offsets[value] + place_bytes(value)


class _BudgetWaits:
    """An op that takes memory waits for the first N releases of its text, the smallest number with which it fits."""

    def __init__(self, memory: str, spare_bytes: int, changes: dict[fx.Node, tuple[int, int]] | None = None):
        self.memory = memory
        self.empty_bytes = spare_bytes
        self.spare_bytes = spare_bytes  # if everything up to here had started and ended
        self.releases: list[int] = []  # tasks, in text order
        self.released_bytes = [0]  # running sum
        self.waited: dict[str, int] = {}  # per stream, the number of releases that its ops have waited for
        self.changes = {} if changes is None else changes  # the same in every step, and in any order of receives

    def begin(self) -> None:
        """A step begins: nothing is left of the step before but what its releases will give back."""
        self.spare_bytes = self.empty_bytes

    def change(self, node: fx.Node, work: ops.Work) -> tuple[int, int]:
        if node not in self.changes:
            self.changes[node] = memory_change(node, work, self.memory)
        return self.changes[node]

    def visit(self, node: fx.Node, index: int, work: ops.Work) -> list[int]:
        taken, given = self.change(node, work)
        self.spare_bytes -= taken
        found: list[int] = []
        if taken:
            count = bisect_left(self.released_bytes, self.released_bytes[-1] - self.spare_bytes)
            count = min(count, len(self.releases))
            found = self.releases[self.waited.get(work.stream, 0) : count]
            self.waited[work.stream] = max(count, self.waited.get(work.stream, 0))
        if given:
            self.spare_bytes += given
            self.releases.append(index)
            self.released_bytes.append(self.released_bytes[-1] + given)
        return found


class _PoolWaits(_BudgetWaits):
    """The same for one pool of a device's memory."""

    def __init__(self, pools: Pools, pool: str, spare_bytes: int):
        super().__init__(ops.DEVICE, spare_bytes)
        self.pools, self.pool = pools, pool

    def change(self, node: fx.Node, work: ops.Work) -> tuple[int, int]:
        change = self.pools.changes[node]
        return change.taken.get(self.pool, 0), change.given.get(self.pool, 0)


def memory_change(node: fx.Node, work: ops.Work, memory: str) -> tuple[int, int]:
    """Bytes of a memory that an op takes when it starts and gives back when it ends, outside the arena.

    Results that replace operands in place count only with the difference in bytes.
    """
    if node.target is ops.free:
        freed = [v.meta["type"] for v in operands(node) if not places_of(v)]
        return 0, sum(kind.bytes for kind in freed if kind.memory == memory)
    workspace = 0 if memory != work.workspace_memory or op_of(node).workspace_in_arena else work.workspace_bytes
    if takes_place(node):
        gone = [v.meta["type"] for v in donated_operands(node) if not places_of(v)]
        return workspace, workspace + sum(kind.bytes for kind in gone if kind.memory == memory)
    made = (value.meta["type"] for value in values_of(node))
    grown = sum(kind.bytes for kind in made if kind.owned and kind.memory == memory)
    grown -= sum(v.meta["type"].bytes for v in donated_operands(node) if v.meta["type"].memory == memory)
    return max(0, grown) + workspace, max(0, -grown) + workspace
