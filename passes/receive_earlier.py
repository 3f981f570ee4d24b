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
from ..ir.errors import VerifyError
from ..ir.machine.hardware import Hardware
from ..ir.program import Order, Program, build_order, find_cycle, profile_memory
from ..ir.verify.case import Case
from ..runtime.simulate import simulate
from .draft import Draft

_Move = tuple[int, fx.Node, fx.Node]  # a device, a receive, and an earlier op of the device that the receive waits for


def receive_earlier(programs: Sequence[Program], hardware: Hardware) -> list[Program] | None:
    """Copies of the programs in an order in which no op waits for ever; None where none is found."""
    memories = Case(programs, hardware).memories  # the same in any order of receives, which lie in no arena
    found = [program.copy() for program in programs]
    done: set[_Move] = set()
    while True:
        order = build_order(found, memories)
        ring = find_cycle(order)
        if ring is None:
            return found
        for move in _moves(order, ring):
            if move not in done and _make(move, found[move[0]], memories[move[0]].budget_bytes):
                done.add(move)
                break
        else:
            return None


def simulated_s(draft: Draft, programs: Sequence[Program]) -> float | None:
    """Simulated seconds of a step of programs that a pass tries, in another order where they need one; None where
    devices would wait for ever in any order that is found."""

    def step_s(order: Sequence[Program]) -> float:
        return simulate(order, draft.machine, precision=draft.options.precision).step_s

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


def _make(move: _Move, program: Program, budget_bytes: int) -> bool:
    """Put a receive, with those that come between, before an earlier op, unless the device's memory is too small."""
    _, node, before = move
    rows = list(program.ops())
    between = rows[rows.index(before) : rows.index(node)] if before.target is not ops.recv else []
    moved = [row for row in between if row.target is ops.recv] + [node]
    places = []
    for row in moved:
        places.append(row.next)
        before.prepend(row)
    if profile_memory(program).peak_bytes[ops.DEVICE] <= budget_bytes:
        return True
    for row, place in zip(reversed(moved), reversed(places)):
        place.prepend(row)
    return False
