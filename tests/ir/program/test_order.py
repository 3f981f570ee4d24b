"""Each kind of wait, with its reason."""

from __future__ import annotations

from torch import fx

from penstock.ir import ops
from penstock.ir.program import (
    Memory,
    Order,
    Program,
    build_order,
    find_cycle,
    memory_change,
    place_frees,
    profile_memory,
    work_of,
)
from penstock.tests.ir.program.handmade import pipeline


def name_of(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def calls(program: Program, op: ops.Op) -> list[fx.Node]:
    return [node for node in program.ops() if node.target is op]


def reasons(order: Order, late: fx.Node, early: fx.Node) -> list[str]:
    return [why for other, why in order.tasks[order.task_of[late]].waits if other == order.task_of[early]]


def test_an_op_waits_for_its_operands_and_its_stream() -> None:
    programs = pipeline(2, 2, 2)
    order = build_order(programs, {})
    first, second = calls(programs[0], ops.forward)
    assert reasons(order, first, name_of(programs[0], "x_m0")) == ["needs `x_m0`"]
    assert reasons(order, second, first) == ["follows on stream compute"]
    assert not reasons(order, name_of(programs[0], "x_m1"), first)
    assert find_cycle(order) is None


def test_a_send_and_its_receive_are_one_task_and_one_program_can_be_ordered_alone() -> None:
    programs = pipeline(2, 2, 1)
    order = build_order(programs, {})
    send, recv = calls(programs[0], ops.send)[0], calls(programs[1], ops.recv)[0]
    assert order.task_of[send] == order.task_of[recv]
    alone = build_order(programs[:1], {})
    assert len(alone.tasks) == len(list(programs[0].ops())) and find_cycle(alone) is None


def test_freeing_and_taking_over_wait_for_earlier_readers() -> None:
    program = Program(0, pipeline(2, 2, 1)[0].interface)
    left, right = (program.emit(ops.load, program.batch, "x", micro_batch=0)[0] for _ in range(2))
    program.emit(ops.send, left, dst=1, tag="t")
    send = calls(program, ops.send)[0]
    total = program.emit(ops.add, left, right)[0]
    place_frees(program)
    order = build_order([program], {})
    assert reasons(order, total, send) == [f"`{left.name}` is still read"]
    free = next(node for node in calls(program, ops.free) if right in node.args)
    assert f"`{right.name}` is still read" in reasons(order, free, total)


def test_fetches_and_updates_of_a_stage_keep_their_order() -> None:
    program = pipeline(1, 1, 1)[0]
    update = calls(program, ops.step)[0]
    again = program.emit(ops.fetch, "stage0.weights")[0]
    other = calls(program, ops.fetch)[0]
    order = build_order([program], {})
    assert reasons(order, update, other) == ["the weights of stage0 are still being read"]
    assert "stage0 is updated first" in reasons(order, again, update)


def test_a_fetch_waits_for_who_lay_in_its_place() -> None:
    program = pipeline(1, 3, 1, prefetch=False)[0]
    order = build_order([program], {})
    fetches, frees = calls(program, ops.fetch), calls(program, ops.free)
    before = next(node for node in frees if fetches[0] in node.args)
    assert reasons(order, fetches[1], before) == ["its part of the arena is still taken"]
    ahead = pipeline(1, 3, 1)[0]
    order = build_order([ahead], {})
    second = order.tasks[order.task_of[calls(ahead, ops.fetch)[1]]]
    assert [why for _, why in second.waits] == ["follows on stream h2d"]


def test_taking_memory_waits_for_just_enough_releases() -> None:
    program = Program(0, pipeline(2, 2, 1)[0].interface)
    frees = []
    for _ in range(4):
        (value,) = program.emit(ops.load, program.batch, "x", micro_batch=0)
        program.emit(ops.free, value)
        frees.append(calls(program, ops.free)[-1])
    last, unit = program.emit(ops.load, program.batch, "x", micro_batch=0)[0], value.meta["type"].bytes
    profile = profile_memory(program)
    for places in range(1, 7):
        order = build_order([program], {0: Memory(profile, places * unit)})
        waited = [free for free in frees if reasons(order, last, free)]
        streams = [node for node in calls(program, ops.load) if any(reasons(order, node, free) for free in frees)]
        # With room for n, the fifth of them must see the first 5 - n given back; those that an earlier op on its
        # stream has waited for need not be named again.
        needed = max(0, 5 - places)
        assert waited == frees[max(0, needed - 1) : needed] and len(streams) == needed


def test_changes_of_memory_add_up_to_the_profile() -> None:
    for program in pipeline(2, 4, 3, clip=True, rows=64) + pipeline(2, 4, 3, fetched=False, kept=True):
        profile = profile_memory(program)
        now = profile.persistent.total(ops.DEVICE) + profile.arena_bytes
        for node in program.ops():
            taken, given = memory_change(node, work_of(program, node), ops.DEVICE)
            if node.target is not ops.free:
                assert profile.live_bytes[node] == now + taken
            now += taken - given


def test_several_steps_wait_in_each_as_one_does_and_find_no_ring() -> None:
    programs = pipeline(2, 4, 3, ssd="states")
    memories = {p.device: Memory(profile_memory(p), profile_memory(p).peak_bytes[ops.DEVICE]) for p in programs}
    one, three = build_order(programs, memories), build_order(programs, memories, steps=3)
    count = one.per_step
    assert len(three.tasks) == 3 * count and find_cycle(three) is None
    for index, task in enumerate(three.tasks):
        own = {other % count for other, _ in task.waits if other >= index - index % count}
        assert own == {other for other, _ in one.tasks[index % count].waits}
    steps = {n.args[0]: one.task_of[n] for p in programs for n in calls(p, ops.step)}
    writes = {str(n.kwargs["to"]).partition(".")[0]: one.task_of[n] for p in programs for n in calls(p, ops.write)}
    for program in programs:
        for node in calls(program, ops.fetch) + calls(program, ops.read):
            stage = str(node.args[0]).partition(".")[0]
            update = writes[stage] if node.target is ops.read else steps[stage]
            assert update in {other for other, _ in three.tasks[one.task_of[node] + count].waits}
