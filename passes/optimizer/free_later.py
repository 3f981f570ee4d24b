"""Gradients that leave a device give their memory back after the backwards that need not wait for it.

In: programs with updates. Out: the same programs, in which some frees of offloaded gradients come later. Ops wait for
releases in the order of the text (`ir/program/order.py`). The memory may hold a stage's gradients beside each backward
of the next stage, but not beside the workspaces of two: with the free before them, the second backward waits for the
gradients to have left, as the workspace of the first is given back after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from ...ir import ops
from ...ir.calls import op_of
from ...ir.machine.hardware import Device, Hardware
from ...ir.program import Memory, Program, profile_memory


def free_gradients_later(programs: Sequence[Program], hardware: Hardware) -> None:
    """Put frees of gradients after the backwards of the next stage, where one of these waits for them and the device
    has memory for both."""
    for program in programs:
        following = _following(program)
        if following:
            _move(program, hardware.devices[program.device], following)


def _following(program: Program) -> dict[fx.Node, fx.Node]:
    """For each free of gradients that left, the op by which the next ones leave."""
    offloads = [n for n in program.ops() if n.target is ops.offload and n.meta["type"].kind == "grads"]
    found = {}
    for offload, after in pairwise(offloads):
        found.update({user: after for user in offload.all_input_nodes[0].users if user.target is ops.free})
    return found


def _move(program: Program, owner: Device, following: dict[fx.Node, fx.Node]) -> None:
    profile = profile_memory(program)
    memory = Memory(profile, owner.budget_bytes, pooled=owner.kind == "cuda")
    budgets = memory.waits(program)  # of the device's memory; of a GPU's, one for each pool
    rows, place = list(program.ops()), dict[fx.Node, int]()
    held: list[list[int]] = [[] for _ in budgets]  # bytes while each op runs
    now, waited = [0] * len(budgets), dict[fx.Node, None]()
    for index, node in enumerate(rows):
        place[node], work = index, profile.work_of[node]
        for i, budget in enumerate(budgets):
            frees = [rows[other] for other in budget.visit(node, index, work) if rows[other] in following]
            if op_of(node).gives_gradients:
                waited |= dict.fromkeys(free for free in frees if following[free] not in place)
            taken, given = budget.change(node, work)
            held[i].append(now[i] + taken)
            now[i] += taken - given
    for free in waited:
        begin, end = place[free] + 1, place[following[free]]
        freed = [budget.change(free, profile.work_of[free])[1] for budget in budgets]
        if all(max(h[begin:end]) + size <= b.empty_bytes for h, size, b in zip(held, freed, budgets)):
            following[free].prepend(free)
