"""Gradients that leave are freed after backwards that would wait for them, where the device's memory holds both."""

from __future__ import annotations

import pytest
from torch import fx

from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Memory, Program, build_order, pooled_bytes, profile_memory
from penstock.ir.verify import verify
from penstock.passes.optimizer.free_later import free_gradients_later
from penstock.runtime.simulate import simulate
from penstock.tests.ir.program.handmade import pipeline


def two_stages() -> Program:
    return pipeline(1, 2, 8, width=64, rows=4)[0]


def calls(program: Program, op: ops.Op) -> list[fx.Node]:
    return [node for node in program.ops() if node.target is op]


def left(program: Program) -> fx.Node:
    """The free of the gradients that leave first."""
    offload = calls(program, ops.offload)[0]
    (free,) = [free for free in calls(program, ops.free) if offload.args[0] in free.all_input_nodes]
    return free


def waiting(program: Program, budget_bytes: int, kind: str) -> list[int]:
    """The backwards of the stage after it that wait for these."""
    memory = Memory(profile_memory(program), budget_bytes, pooled=kind == "cuda")
    order = build_order([program], {0: memory})
    free = order.task_of[left(program)]
    backwards = [node for node in calls(program, ops.backward) if node.args[0] == "stage0"]
    return [i for i, node in enumerate(backwards) if free in dict(order.tasks[order.task_of[node]].waits)]


def machine(budget_bytes: int, kind: str = "cpu") -> Hardware:
    hardware = Hardware.cpu(1, memory=budget_bytes, d2h="20MB/s")
    return hardware.model_copy(update={"devices": [hardware.devices[0].model_copy(update={"kind": kind})]})


def both_bytes(program: Program, kind: str) -> int:
    """The bytes of the gradients of both stages beside one backward."""
    moved = program.copy()
    calls(moved, ops.offload)[1].prepend(left(moved))
    return pooled_bytes(moved) if kind == "cuda" else profile_memory(moved).peak_bytes[ops.DEVICE]


@pytest.mark.parametrize(("kind", "more_bytes"), [("cpu", 0), ("cuda", 2048)])
def test_a_backward_that_waits_does_not_where_memory_holds_both(kind: str, more_bytes: int) -> None:
    """On a GPU, other pools have their part of what is left."""
    program = two_stages()
    budget_bytes = both_bytes(program, kind) + more_bytes
    assert waiting(program, budget_bytes, kind) == [1]
    found = program.copy()
    free_gradients_later([found], machine(budget_bytes, kind))
    assert not waiting(found, budget_bytes, kind)
    assert pooled_bytes(found) <= budget_bytes
    verify([found], machine(budget_bytes, kind))


def test_a_step_is_shorter() -> None:
    program, hardware = two_stages(), machine(both_bytes(two_stages(), "cpu"))
    found = program.copy()
    free_gradients_later([found], hardware)
    assert simulate([found], hardware).step_s < simulate([program], hardware).step_s


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("more_bytes", [-1, 1 << 30])
def test_the_text_stays_where_memory_is_too_small_or_ample(more_bytes: int, kind: str) -> None:
    program = two_stages()
    budget_bytes = both_bytes(program, kind) + more_bytes
    assert bool(waiting(program, budget_bytes, kind)) == (more_bytes < 0)
    found = program.copy()
    free_gradients_later([found], machine(budget_bytes, kind))
    assert [node.name for node in found.ops()] == [node.name for node in program.ops()]
