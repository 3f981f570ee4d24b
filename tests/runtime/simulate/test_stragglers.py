"""A device that is slower than its equals, or than its plan, is found in a step's timeline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.compiler.pipeline import parse_pipeline
from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.machine.overrides import with_slower
from penstock.ir.program import Program
from penstock.runtime.simulate import Timeline, find_stragglers, simulate
from penstock.tests.ir.program.handmade import pipeline
from penstock.tests.passes.running import apply, chain, draft_of

HARDWARE = Hardware.cpu(4, memory="64MB")


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    return pipeline(4, 4, 4, width=64, rows=512, flops=1e9)


def slow_down(timeline: Timeline, device: int, op: str, factor: float, everywhere: float = 1.0) -> Timeline:
    """The same step, with one device's ops of a kind taking `factor` times as long."""
    spans = []
    for span in timeline.spans:
        times = everywhere * (factor if (span.device, span.op) == (device, op) else 1.0)
        spans.append(replace(span, end_s=span.start_s + times * (span.end_s - span.start_s)))
    return replace(timeline, spans=spans)


def test_none_in_a_step_as_planned_however_slow_the_machine_is(programs: list[Program]) -> None:
    planned = simulate(programs, HARDWARE)
    assert find_stragglers(planned, programs, HARDWARE) == []
    assert find_stragglers(slow_down(planned, 0, "none", 1.0, everywhere=7.0), programs, HARDWARE) == []


def test_one_is_found_with_the_op_and_what_it_cost(programs: list[Program]) -> None:
    planned = simulate(programs, HARDWARE)
    found = find_stragglers(slow_down(planned, 2, "backward", 3.0, everywhere=2.0), programs, HARDWARE)
    assert [(row.device, row.stream, row.op, row.stage) for row in found] == [(2, "compute", "backward", "stage2")]
    (row,) = found
    assert 1.5 < row.ratio < 3.0 and 0.2 < row.held_up < 0.7 and not row.by_equals
    assert str(row).startswith(f"cpu2 took {row.ratio:.1f}x what the plan expects of it beside the others in backward ")
    assert str(row).endswith(f"of stage2; it held up the step by {row.held_up:.0%}")


def test_it_cost_what_the_step_takes_less_without_it(programs: list[Program]) -> None:
    slow, planned = (simulate(programs, machine) for machine in (with_slower(HARDWARE, {1: 3.0}), HARDWARE))
    (row,) = find_stragglers(slow, programs, HARDWARE)
    assert row.held_up == pytest.approx(1 - planned.step_s / slow.step_s, rel=0.01)  # links are shared otherwise


def test_a_slow_device_is_read_in_full_where_backwards_have_halves() -> None:
    """In a zero-bubble pipeline the first stage alone has whole backwards: no other device tells how long they take."""
    ends = "schedule-zero-bubble, insert-remat, insert-fetch, insert-optimizer"
    line = f"coarsen, partition-balanced{{stages=4}}, map-round-robin, {ends}"
    draft = apply(draft_of(chain(depth=4, width=64), HARDWARE, micro_batches=4), *parse_pipeline(line, 4))
    planned = simulate(draft.programs, HARDWARE)
    names = {span.op: {s.device for s in planned.spans if s.op == span.op} for span in planned.spans}
    assert names["backward"] == {0} and names["backward_input"] == {1, 2, 3}
    for device in range(4):
        slow = planned
        for op in {span.op for span in planned.spans if span.stream == ops.COMPUTE}:
            slow = slow_down(slow, device, op, 3.0)
        (row,) = find_stragglers(slow, draft.programs, HARDWARE)
        assert row.device == device and row.ratio == pytest.approx(3.0, rel=1e-6)


def test_time_lost_where_nobody_waits_costs_nothing(programs: list[Program]) -> None:
    """The last device's first forward has slack in a pipeline that ends elsewhere: only real delays are told."""
    planned = simulate(programs, HARDWARE)
    (first, *_) = [span for span in planned.spans if span.op == "step" and span.device == 3]
    spans = [
        replace(span, end_s=span.start_s + 1.3 * (span.end_s - span.start_s)) if span is first else span
        for span in planned.spans
    ]
    assert find_stragglers(replace(planned, spans=spans), programs, HARDWARE) == []
