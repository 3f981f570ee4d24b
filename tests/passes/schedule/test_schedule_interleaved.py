"""`schedule-interleaved`: orders, what may be held, deadlocks, refusals, and training as by fill and drain."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.errors import PassError
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.schedule.schedule_1f1b import Schedule1F1B
from penstock.passes.schedule.schedule_interleaved import ScheduleInterleaved, interleave, micro_batch_groups
from penstock.passes.schedule.schedule_pipeline import SchedulePipeline
from penstock.runtime.simulate import simulate
from penstock.tests.golden_text import Golden
from penstock.tests.passes.running import (
    apply,
    assert_trains_like_eager,
    chain,
    cut,
    draft_of,
    text_of,
    to_schedule,
    trace_case,
)


def through(schedule: object, stages: int = 0) -> list:
    return [*to_schedule(stages)[:-1], schedule]


def turns(program: Program) -> str:
    """Forwards and backwards as letters with stage and micro-batch: F0.0 F2.0 B2.0."""
    found = [n for n in program.ops() if n.target in (ops.forward, ops.backward)]
    letters = ["F" if n.target is ops.forward else "B" for n in found]
    return " ".join(f"{a}{str(n.args[0])[5:]}.{n.kwargs['micro_batch']}" for a, n in zip(letters, found))


def test_the_text(golden: Golden) -> None:
    draft = apply(draft_of(chain(depth=3), micro_batches=2), *through(ScheduleInterleaved(), 4))
    golden(text_of(draft), "two-devices")


def test_groups_of_micro_batches_go_through_a_devices_stages() -> None:
    draft = apply(draft_of(chain(depth=3), micro_batches=4), *through(ScheduleInterleaved(), 4))
    assert [turns(p) for p in draft.programs] == [
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ]


@pytest.mark.parametrize(("devices", "count", "sizes"), [(4, 8, [4, 4]), (4, 11, [6, 5]), (4, 3, [3]), (2, 5, [3, 2])])
def test_groups_are_as_equal_as_they_can_be(devices: int, count: int, sizes: list[int]) -> None:
    assert [len(group) for group in micro_batch_groups(devices, count)] == sizes


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(2, 4), st.integers(1, 30))
def test_any_number_of_micro_batches_flows_and_no_more_is_held_than_promised(n: int, v: int, count: int) -> None:
    """A chain of stages: each device's next turn finds what it needs, whatever the numbers."""
    todo = [interleave(device, n, v, count) for device in range(n)]
    largest = len(micro_batch_groups(n, count)[0])
    for device, order in enumerate(todo):
        assert sorted(order) == sorted(((i, m), b) for i in range(v) for m in range(count) for b in (False, True))
        held = max(accumulate(-1 if is_backward else 1 for _, is_backward in order))
        assert held <= (v - 1) * largest + 2 * (n - 1 - device) + 1
    done: set[tuple[int, int, bool]] = set()
    places = [0] * n
    while sum(places) < 2 * n * v * count:
        before = list(places)
        for device, order in enumerate(todo):
            while places[device] < len(order):
                (i, m), is_backward = order[places[device]]
                stage = i * n + device
                needed = {(stage, m, False), (stage + 1, m, True)} if is_backward else {(stage - 1, m, False)}
                if not {row for row in needed if 0 <= row[0] < n * v} <= done:
                    break
                done.add((stage, m, is_backward))
                places[device] += 1
        assert places != before


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_cut_of_a_model_with_edges_over_stages_deadlocks(data: st.DataObject) -> None:
    """T5: the encoder's output goes to every stage of the decoder."""
    draft = draft_of(trace_case("t5")[0], micro_batches=data.draw(st.integers(1, 5)))
    apply(draft, *to_schedule()[:1])
    names = [block.name for block in draft.blocks]
    num_devices = data.draw(st.integers(1, len(names) // 2))
    stages = num_devices * data.draw(st.integers(2, len(names) // num_devices))
    cuts = sorted(data.draw(st.permutations(range(1, len(names))))[: stages - 1])
    draft.machine = Hardware.cpu(num_devices=num_devices)
    apply(draft, *through(ScheduleInterleaved())[1:], decisions={"stages": cut(names, cuts)})


@pytest.mark.parametrize("name", ["t5", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_training_is_bit_for_bit_that_of_fill_and_drain(name: str) -> None:
    graph, batches = trace_case(name)
    runs = []
    for schedule in (SchedulePipeline(), ScheduleInterleaved()):
        draft = draft_of(graph, micro_batches=3, max_grad_norm=1.0)
        apply(draft, *through(schedule, 4), InsertRemat(), InsertFetch(), InsertOptimizer())
        runs.append(assert_trains_like_eager(draft, batches, tolerance=1e-6))
    first, second = (run.weights() for run in runs)
    assert all((first[key] == second[key]).all() for key in first)


@pytest.mark.slow
def test_the_bubble_shrinks_with_the_stages_of_a_device() -> None:
    """16 equal blocks on 4 devices, 4 micro-batches: (N - 1) / v turns of a device's whole work lie idle."""
    hardware, graph = Hardware.cpu(num_devices=4), chain(depth=16, width=512, rows=256)
    step_s = {}
    for stages, schedule in ((4, Schedule1F1B()), (8, ScheduleInterleaved()), (16, ScheduleInterleaved())):
        draft = apply(draft_of(graph, hardware, micro_batches=4), *through(schedule, stages))
        step_s[stages] = simulate(draft.programs, hardware).step_s
    busy_s = step_s[4] * 4 / 7  # 1F1B: M + N - 1 turns for M
    assert step_s[8] == pytest.approx(busy_s * (1 + 3 / 8), rel=0.06)
    assert step_s[16] == pytest.approx(busy_s * (1 + 3 / 16), rel=0.1)


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        ([0, 1], "2 stages for 2 devices; the nearest numbers that work are 4 and 6, .*partition-balanced{stages=4}"),
        ([0, 1, 0, 1, 0], "5 stages for 2 devices; the nearest numbers that work are 4 and 6"),
        ([0, 0, 1, 1], "stage1 is on device 0 instead of 1; use map-round-robin, or schedule-1f1b"),
    ],
)
def test_what_does_not_go_round_is_refused(devices: list[int], match: str) -> None:
    draft = draft_of(chain(depth=8), micro_batches=2)
    with pytest.raises(PassError, match=match):
        apply(draft, *through(ScheduleInterleaved(), len(devices)), decisions={"devices": devices})
