"""`receive_earlier`: programs that would wait for ever get another order, train as before, or are refused as before."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from penstock.graph.opgraph import OpGraph
from penstock.ir import ops
from penstock.ir.errors import VerifyError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, build_order, join_orders, profile_memory
from penstock.ir.verify import verify
from penstock.ir.verify.case import Case
from penstock.passes.draft import Draft
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.receive_earlier import _Room, receive_earlier, simulated_s
from penstock.passes.schedule.schedule import Schedule
from penstock.passes.schedule.schedule_interleaved import ScheduleInterleaved
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.simulate import simulate
from penstock.tests.ir.verify.test_rules import exchange
from penstock.tests.passes.running import (
    Batch,
    Chain,
    apply,
    assert_prints_and_parses,
    assert_trains_like_eager,
    draft_of,
    join_batches,
    reference,
    to_schedule,
    traced_model,
)


def swapping_job(schedule: Schedule, num_devices: int, depth: int, rows: int, micro_batches: int, memory: int) -> Draft:
    """Two stages a device, whose weights come from DRAM and whose saved tensors are computed again."""
    graph = graph_of(depth, rows)
    machine = Hardware.cpu(num_devices, memory=memory)
    draft = draft_of(graph, machine, micro_batches=micro_batches, state_bytes_per_param=4.0)
    passes = [*to_schedule(2 * num_devices)[:-1], schedule, InsertRemat(always=True), InsertFetch(swap=True)]
    return apply(draft, *passes, InsertOptimizer())


@functools.cache
def graph_of(depth: int, rows: int) -> OpGraph:
    """Shared between tests, which do not change it."""
    return traced_model(Chain(depth), batches(1, rows))[0]


def batches(count: int, rows: int) -> list[Batch]:
    torch.manual_seed(0)
    return [{"x": torch.randn(rows, 16), "labels": torch.randint(4, (rows,))} for _ in range(count)]


def messages_received(programs: list[Program]) -> list[list[tuple[object, ...]]]:
    """The messages of each device in the order in which it receives them, by sender."""
    own = [[(n.kwargs["src"], n.kwargs["tag"]) for n in p.ops() if n.target is ops.recv] for p in programs]
    return [sorted(rows, key=lambda row: row[0]) for rows in own]


@pytest.mark.parametrize(
    ("schedule", "num_devices", "depth", "rows", "micro_batches", "memory"),
    [
        pytest.param(SchedulePipeline(), 2, 6, 4, 6, 29000, id="before a free"),
        pytest.param(
            ScheduleInterleaved(), 3, 8, 8, 8, 41449, id="before another sender's message", marks=pytest.mark.slow
        ),
    ],
)
def test_what_would_wait_for_ever_runs_within_memory_and_trains_like_eager(
    schedule: Schedule, num_devices: int, depth: int, rows: int, micro_batches: int, memory: int
) -> None:
    draft = swapping_job(schedule, num_devices, depth, rows, micro_batches, memory)
    with pytest.raises(VerifyError, match=r"deadlock(.|\n)*device memory must be given back first"):
        verify(draft.programs, draft.machine)
    before = draft.programs
    found = receive_earlier(before, draft.machine)
    assert found is not None
    verify(found, draft.machine)
    assert_prints_and_parses(found)
    assert messages_received(found) == messages_received(before), "messages of one sender keep their order"
    for old, new in zip(before, found):
        names = [[n.name for n in p.ops() if n.target is not ops.recv] for p in (old, new)]
        assert names[0] == names[1], "only receives move"
    draft.programs = found
    assert_trains_like_eager(draft, batches(micro_batches, rows))
    budgets = {f"device{i}": memory for i in range(num_devices)}
    reference(draft, budgets=budgets).step(join_batches(batches(micro_batches, rows)))


@pytest.mark.slow
def test_orders_of_single_programs_are_joined_to_that_of_all() -> None:
    """What is kept of devices whose order has not changed is what would be built again, in the same places."""
    programs = swapping_job(ScheduleInterleaved(), 3, 8, 8, 8, 41449).programs
    memories = Case(programs, Hardware.cpu(3, memory=41449)).memories
    whole = build_order(programs, memories)
    joined_order = join_orders(programs, [build_order([program], memories) for program in programs])
    assert [task.parts for task in joined_order.tasks] == [task.parts for task in whole.tasks]
    assert [task.waits for task in joined_order.tasks] == [task.waits for task in whole.tasks]
    assert joined_order.task_of == whole.task_of


def test_memory_after_a_move_is_that_of_the_moved_text(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[bool] = []
    make = _Room.make

    def check_model(room: _Room, move: Any) -> bool:
        made = make(room, move)
        anew = profile_memory(room.program)
        assert room.profile.live_bytes == anew.live_bytes
        assert room.profile.peak_bytes[ops.DEVICE] == anew.peak_bytes[ops.DEVICE]
        moves.append(made)
        return made

    monkeypatch.setattr(_Room, "make", check_model)
    for memory in (28928, 29000):  # at the first, moves lack room
        draft = swapping_job(SchedulePipeline(), 2, 6, 4, 6, memory)
        receive_earlier(draft.programs, draft.machine)
    assert {True, False} == set(moves)


def test_work_is_limited() -> None:
    draft = swapping_job(SchedulePipeline(), 2, 6, 4, 6, 29000)
    assert receive_earlier(draft.programs, draft.machine, most_s=1e-3) is None
    assert receive_earlier(draft.programs, draft.machine) is not None


def test_programs_that_run_keep_their_order() -> None:
    draft = swapping_job(SchedulePipeline(), 2, 6, 4, 6, 1 << 20)
    found = receive_earlier(draft.programs, draft.machine)
    assert found is not None
    assert [str(p.graph) for p in found] == [str(p.graph) for p in draft.programs]


def test_without_room_for_a_message_there_is_no_other_order() -> None:
    """Each device holds what it sends until the other takes it, and has room for nothing else."""
    programs = exchange()
    need_bytes = max(profile_memory(program).peak_bytes[ops.DEVICE] for program in programs)
    texts = [str(program.graph) for program in programs]
    assert receive_earlier(programs, Hardware.cpu(2, memory=need_bytes)) is None
    assert [str(program.graph) for program in programs] == texts
    assert receive_earlier(programs, Hardware.cpu(2, memory=2 * need_bytes)) is not None


@pytest.mark.slow
def test_a_trial_is_timed_in_the_order_in_which_it_can_run() -> None:
    draft = swapping_job(SchedulePipeline(), 2, 6, 4, 6, 29000)
    found = receive_earlier(draft.programs, draft.machine)
    assert found is not None
    assert simulated_s(draft, draft.programs) == simulate(found, draft.machine).step_s
    roomy = swapping_job(SchedulePipeline(), 2, 6, 4, 6, 1 << 20)
    assert simulated_s(roomy, roomy.programs) == simulate(roomy.programs, roomy.machine).step_s


def test_a_trial_that_waits_for_ever_in_any_order_has_no_time() -> None:
    programs = exchange()
    need_bytes = max(profile_memory(program).peak_bytes[ops.DEVICE] for program in programs)
    draft = swapping_job(SchedulePipeline(), 2, 6, 4, 6, 1 << 20)
    draft.machine = Hardware.cpu(2, memory=need_bytes)
    assert simulated_s(draft, programs) is None
