"""One program made ready to be issued: per op, everything that can be known before the first step.

Most of this is what each op waits for. The verifier and the simulator use the same order (`ir/program/order.py`), so a
program that the verifier has passed cannot block a device, and memory is reused only after its earlier users are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.program import (
    ON_DEVICE,
    PAGE,
    SIZES,
    Memory,
    Persistent,
    Program,
    StageHome,
    aligned,
    build_order,
    donated_operands,
    homes_of,
    judging_op,
    line_numbers,
    link_turn_of,
    losses_of,
    operands,
    place_bytes,
    places_of,
    plan_arena,
    print_node,
    profile_memory,
    takes_place,
    values_of,
    work_of,
)
from ..stage.arena import Pieces


@dataclass
class Issue:
    """One op. `takes` and `gives` are values by name and memory, `waits` the indices of earlier ops (see `Issues`)."""

    index: int
    op: str
    line: int  # 1-based, in the generated file
    text: str
    stream: str
    memory: str  # that of its first result or, without results, of its first operand
    results: list[str]
    takes: list[tuple[str, str, int]]  # memory, name, bytes
    gives: list[tuple[str, str]]  # memory and name of values that are taken over in place, or freed
    workspace_bytes: int
    workspace_memory: str
    moved_bytes: int
    route: tuple[str, str]  # source, target
    micro_batch: int | None
    sized_as: int | None  # the micro-batch whose sizes an arriving value has
    pieces: Pieces  # of fetched weights: offset in the arena, first and last + 1 parameter
    place: int | None  # of a value that is read, offloaded, written or scattered: its offset in its arena
    place_bytes: int  # in host memories whole pages
    staging: tuple[int, int] | None  # of a collective's workspace: offset in the device's arena, and bytes
    link_turn: int | None  # of fetched weights
    tag: str  # of a message; for a load the name of the input
    peer: int
    group: str  # of a collective
    stages: list[str]  # of its operands and results, in order
    keeps: bool = False  # its last result is what backward needs
    adds_on: bool = False  # another backward adds to its gradients
    losses: tuple[int, ...] = ()  # the numbers of those of its results that are losses, or a member's part of one
    turn: int = 0  # the number of ops of this kind, of its stage, before it
    judges: bool = False  # the host of a GPU looks at the step's losses after it
    waits: tuple[int, ...] = ()
    before: tuple[int, ...] = ()  # as `waits`, ops of the step before, where one may be under way
    least_s: float = 0.0  # the least seconds of a transfer on throttled links
    shared: int | None = None  # its number at the link server, if it may have to share such links

    @property
    def stage(self) -> str:
        """The stage of its first operand or, if no operand belongs to a stage, of its first result."""
        return self.stages[0]

    @property
    def where(self) -> str:
        """For messages: the op's text, with its micro-batch."""
        return f"`{self.text}`" + ("" if self.micro_batch is None else f" (micro-batch {self.micro_batch})")


@dataclass
class Issues:
    """All ops of a program in text order."""

    ops: list[Issue]
    arenas: dict[str, int]  # bytes of each memory's arena
    persistent: Persistent
    homes: dict[str, StageHome]  # per stage that runs here, the memories in which it persists
    streams: set[str] = field(default_factory=set)
    counted: tuple[dict[str, int], dict[str, int]] | None = None  # of a run, per memory: bytes before it, and its peak
    forwards: tuple[int, ...] = ()  # per stage and micro-batch the first forward
    has_sizes: bool = False  # the sizes of micro-batches differ
    trains: bool = False

    @cached_property
    def moving(self) -> frozenset[str]:
        """The stages whose weights are fetched to different places of the arena."""
        places: dict[str, set[Pieces]] = {}
        for op in self.ops:
            if op.pieces:
                places.setdefault(op.stage, set()).add(op.pieces)
        found = set()
        for stage, each in places.items():
            count = max(pieces[-1][2] for pieces in each)  # fetches of fewer parameters have begun a later one
            if sum(pieces[-1][2] == count for pieces in each) > 1:
                found.add(stage)
        return frozenset(found)

    @cached_property
    def batch_names(self) -> list[str]:
        """The inputs of the batch that this device reads."""
        return sorted({op.tag for op in self.ops if op.op == "load"} | ({SIZES} if self.has_sizes else set()))


def plan_issues(
    program: Program,
    budget_bytes: int,
    dram_budget_bytes: int | None = None,
    stream_of: Callable[[ops.Work], str] = lambda work: work.stream,
    pooled: bool = False,
) -> Issues:
    """Prepare a program whose types are inferred. `stream_of` names the stream that an op really runs on here, `pooled`
    says whether each has device memory of its own."""
    profile = profile_memory(program)
    arenas = [plan_arena(program, memory) for memory in ops.MEMORIES]
    offsets = {node: offset for arena in arenas for node, offset in arena.offsets.items()}
    staging = {node: offset for arena in arenas for node, offset in arena.staging.items()}
    lines = line_numbers(program)
    plan = Issues([], profile.arenas, profile.persistent, homes_of(program))
    plan.has_sizes, plan.trains = bool(program.interface.sizes), program.function == "step"
    index_of: dict[fx.Node, int] = {}
    turns: Counter[tuple[str, ...]] = Counter()
    losses, judging = losses_of(program), judging_op(program)
    for node in program.ops():
        work = work_of(program, node)
        index_of[node] = len(plan.ops)
        plan.ops.append(_issue(len(plan.ops), node, work, node.meta.get("line", lines[node]), stream_of(work)))
        plan.ops[-1].losses = tuple(i for i, value in enumerate(values_of(node)) if value in losses)
        plan.ops[-1].judges = node is judging
        kind = (plan.ops[-1].op, *plan.ops[-1].stages[:1])
        plan.ops[-1].turn = turns[kind]
        turns[kind] += 1
        if node in staging:
            plan.ops[-1].staging = staging[node], work.workspace_bytes
        if takes_place(node, ops.DEVICE) and node.meta["type"].kind in ON_DEVICE:
            plan.ops[-1].pieces = _pieces(program, node, offsets)
        elif node.target is ops.reduce_scatter:
            places = places_of(node)  # its own, or that of the sum so far
            plan.ops[-1].place, plan.ops[-1].place_bytes = offsets[places[0]] if places else None, place_bytes(node)
        elif takes_place(node):
            plan.ops[-1].place, plan.ops[-1].place_bytes = offsets[node], aligned(place_bytes(node), PAGE)
        if op_of(node).streams:
            plan.streams.add(plan.ops[-1].stream)
    firsts = {(op.stages[0], op.micro_batch): op.index for op in reversed(plan.ops) if op.op == "forward"}
    plan.forwards = tuple(sorted(firsts.values()))
    memory = Memory(profile, budget_bytes, dram_budget_bytes, pooled)
    order = build_order([program], {program.device: memory}, steps=2)
    direct: list[set[int]] = [set() for _ in range(2 * len(plan.ops))]  # those of the second step come second
    for node, index in index_of.items():
        for step in (0, 1):
            for other, _ in order.tasks[order.task_of[node] + step * order.per_step].waits:
                later, task = divmod(other, order.per_step)
                before = index_of[order.tasks[task].parts[0][1]] + later * len(plan.ops)
                direct[index + step * len(plan.ops)].add(before)
    for issue in plan.ops:
        issue.before, issue.waits = _last_on_others(issue, direct, plan.ops)
    return plan


def _issue(index: int, node: fx.Node, work: ops.Work, line: int, stream: str) -> Issue:
    op, made, read = op_of(node), values_of(node), operands(node)
    gone = [v for v in (read if node.target is ops.free else donated_operands(node)) if not places_of(v)]
    kinds = [v.meta["type"] for v in made or read]
    owned = [v for v in made if v.meta["type"].owned and not places_of(v)]
    takes = [(v.meta["type"].memory, v.name, v.meta["type"].bytes) for v in owned]
    micro_batch = node.kwargs.get("micro_batch")
    return Issue(
        index=index,
        op=op.name,
        line=line,
        text=print_node(node) or "",
        stream=stream,
        memory=kinds[0].memory if kinds else ops.DEVICE,
        results=[v.name for v in made],
        takes=takes,
        gives=[(v.meta["type"].memory, v.name) for v in gone],
        workspace_bytes=0 if op.workspace_in_arena else work.workspace_bytes,
        workspace_memory=work.workspace_memory,
        moved_bytes=work.moved_bytes,
        route=(work.source, work.target),
        micro_batch=micro_batch if isinstance(micro_batch, int) else None,
        sized_as=_micro_batch_of_users(node) if node.target is ops.recv else None,
        pieces=(),
        place=None,
        place_bytes=0,
        staging=None,
        link_turn=link_turn_of(node),
        tag=str(node.args[1]) if node.target is ops.load else work.tag,
        peer=work.peer,
        group=work.group,
        keeps=bool(made) and made[-1].meta["type"].kind == "kept",
        adds_on=node.target is ops.backward
        and any(user.target is ops.backward and made[-1] in donated_operands(user) for user in made[-1].users),
        stages=[v.meta["type"].stage for v in (*read, *made) if v.meta["type"].stage],
    )


def _micro_batch_of_users(node: fx.Node) -> int | None:
    """The micro-batch that the first computation with a value belongs to."""
    for user in node.users:
        found = user.kwargs.get("micro_batch")
        number = found if isinstance(found, int) else _micro_batch_of_users(user)
        if number is not None:
            return number
    return None


def _pieces(program: Program, node: fx.Node, offsets: dict[fx.Node, int]) -> Pieces:
    """The places of the parameters that are on the device after this fetch; the op's own piece comes last."""
    found: list[tuple[int, int, int]] = []
    for fetch in places_of(node):
        params = fetch.kwargs.get("params")
        stage = fetch.meta["type"].stage
        count = params if isinstance(params, int) else len(program.interface.stages[stage].moving)
        found.append((offsets[fetch], found[-1][2] if found else 0, count))
    return tuple(found)


def _last_on_others(
    issue: Issue, direct: list[set[int]], issues: list[Issue]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last op on each other stream, as streams work in order: those of the step before, and those of its own. A
    `free` has no stream and passes on its waits."""
    count = len(issues)
    last: dict[str, int] = {}
    for other in _expand(direct[issue.index + count], issues, direct):
        stream = issues[other % count].stream
        if stream != issue.stream:
            last[stream] = max(other, last.get(stream, other))
    found = sorted(last.values())
    return tuple(i for i in found if i < count), tuple(i - count for i in found if i >= count)


def _expand(indices: set[int], issues: list[Issue], direct: list[set[int]]) -> set[int]:
    found: set[int] = set()
    for index in indices:
        if not ops.ALL[issues[index % len(issues)].op].streams:
            found |= _expand(direct[index], issues, direct)
        else:
            found.add(index)
    return found
