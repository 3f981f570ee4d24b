"""Another order for programs whose memories are so tight that devices would wait for each other for ever.

In: programs that fit their memories, in which a receive waits, over other devices, for itself: its device must first
give back memory by what comes before it in the text, or first receive what another device sends. Out: the same programs
with such receives before that. The room of a message is then set aside before the device fills it with what it has to
send itself, so that the other device can send, and go on. A receive moves only where the device's memory holds its
message from there on, and messages of one sender keep their order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..ir import ops
from ..ir.calls import op_of
from ..ir.errors import VerifyError
from ..ir.machine.hardware import Hardware
from ..ir.program import Memory, Order, Program, build_order, find_cycle, join_orders, work_of
from ..ir.verify.case import Case
from ..runtime.simulate import seconds_from_rest
from .draft import Draft
from .work_limit import WorkDone

RECEIVE_S = 20.0  # of work
JOINED_S, BUILT_S = 1e-5, 1e-4  # of work, for an op: of all devices in each round, and of the one that changes
_Move = tuple[int, fx.Node, fx.Node]  # a device, a receive, and an earlier op of the device that the receive waits for


def receive_earlier(programs: Sequence[Program], hardware: Hardware, most_s: float = RECEIVE_S) -> list[Program] | None:
    """Copies of the programs in an order in which no op waits for ever; None where none is found with `most_s` seconds
    of work. A move changes the order of one device, so that only this one's is built again."""
    found = [program.copy() for program in programs]
    memories = Case(found, hardware).memories  # the same in any order of receives, which are in no arena
    own = [build_order([program], memories) for program in found]
    rooms = [_Room(program, memories[program.device]) for program in found]
    done: set[_Move] = set()
    work, ops_of_all = WorkDone(), sum(len(order.work_of) for order in own)
    while work.seconds <= most_s:
        work.add(JOINED_S * ops_of_all)
        order = join_orders(found, own)
        ring = find_cycle(order)
        if ring is None:
            return found
        for move in _moves(order, ring):
            if move not in done and rooms[move[0]].make(move):
                done.add(move)
                work.add(BUILT_S * len(own[move[0]].work_of))
                own[move[0]] = build_order([found[move[0]]], memories, known=own[move[0]].work_of)
                break
        else:
            return None
    return None


def simulated_s(draft: Draft, programs: Sequence[Program]) -> float | None:
    """Simulated seconds of a step of programs that a pass tries, in another order where they need one; None where
    devices would wait for ever in any order that is found."""

    def step_s(order: Sequence[Program]) -> float:
        return seconds_from_rest(order, draft.machine, precision=draft.options.precision)

    try:
        return step_s(programs)
    except VerifyError:
        other = receive_earlier(programs, draft.lane_hardware)
    try:
        return None if other is None else step_s(other)
    except VerifyError:  # lanes wait for each other
        return None


def _moves(order: Order, ring: Sequence[tuple[int, str]]) -> list[_Move]:
    """The moves that open a ring: of its receives, each before what it waits for on its own device."""
    after = [index for index, _ in (*ring[1:], ring[0])]
    return [
        (device, node, before)
        for (index, _), other in zip(ring, after)
        for device, node, work in order.tasks[index].parts
        for owner, before, earlier in order.tasks[other].parts
        if node.target is ops.recv
        and owner == device
        and (before.target is not ops.recv or work.peer != earlier.peer)  # one sender's messages keep their order
    ]


class _Room:
    """A device's program, and the room of its memory for receives that come earlier."""

    def __init__(self, program: Program, memory: Memory):
        self.program, self.budget_bytes, self.profile = program, memory.budget_bytes, memory.profile

    def make(self, move: _Move) -> bool:
        """Put a receive, with those between, before an earlier op, unless the device's memory is too small."""
        _, node, before = move
        rows = list(self.program.ops())
        begin, end = rows.index(before), rows.index(node)
        between = rows[begin:end] if before.target is not ops.recv else []
        moved = [row for row in between if row.target is ops.recv] + [node]
        live = self.live_bytes(rows, begin, end, moved)
        peak = max((size for row, size in live.items() if row.target is not ops.free), default=0)
        if max(peak, self.profile.peak_bytes[ops.DEVICE]) > self.budget_bytes:
            return False
        for row in moved:
            before.prepend(row)
        self.profile.live_bytes.update(live)
        self.profile.peak_bytes[ops.DEVICE] = max(peak, self.profile.peak_bytes[ops.DEVICE])
        return True

    def live_bytes(self, rows: Sequence[fx.Node], begin: int, end: int, moved: Sequence[fx.Node]) -> dict[fx.Node, int]:
        """The bytes on the device while ops run, with the moved receives before op `begin` of the text, the last of
        which is op `end` now: the device holds the received values while the ops between run, and nothing else
        changes."""
        live, brought = self.profile.live_bytes, {row: int(row.meta["type"].bytes) for row in moved}
        held = live[rows[begin - 1]] - self.workspace_bytes(rows[begin - 1]) if begin else self.lasting_bytes
        found = {}
        for row in moved:
            held += brought[row]
            found[row] = held + self.workspace_bytes(row)
        early = sum(brought.values())
        for row in rows[begin:end]:
            if row in brought:
                early -= brought[row]
            else:
                found[row] = live[row] + early
        return found

    @property
    def lasting_bytes(self) -> int:
        return int(self.profile.persistent.total(ops.DEVICE) + self.profile.arena_bytes)

    def workspace_bytes(self, row: fx.Node) -> int:
        """Bytes of the device's memory that an op takes while it runs, outside the arena."""
        work = work_of(self.program, row)
        in_arena = row.target is not ops.free and op_of(row).workspace_in_arena
        return 0 if in_arena or work.workspace_memory != ops.DEVICE else work.workspace_bytes
