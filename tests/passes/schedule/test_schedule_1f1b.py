"""`schedule-1f1b`: orders, memory, deadlocks, and training as by fill and drain."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.ir import ops
from penstock.ir.machine.hardware import Hardware
from penstock.ir.program import Program, profile_memory
from penstock.ir.verify import verify
from penstock.passes.memory.insert_fetch import InsertFetch
from penstock.passes.memory.insert_remat import InsertRemat
from penstock.passes.optimizer.insert_optimizer import InsertOptimizer
from penstock.passes.schedule.evaluation import evaluation_programs
from penstock.passes.schedule.schedule_1f1b import Schedule1F1B
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
from penstock.tests.shown_elsewhere import slow_but


def one_forward_one_backward(stages: int = 0) -> list:
    return [*to_schedule(stages)[:-1], Schedule1F1B()]


def turns(program: Program) -> str:
    """Forwards and backwards as letters with their micro-batch: F0 F1 B0."""
    found = [n for n in program.ops() if n.target in (ops.forward, ops.backward)]
    return " ".join(f"{'F' if n.target is ops.forward else 'B'}{n.kwargs['micro_batch']}" for n in found)


def test_the_text(golden: Golden) -> None:
    draft = apply(draft_of(chain(depth=2), micro_batches=3), *one_forward_one_backward())
    golden(text_of(draft), "two-devices")


def test_stage_s_of_equal_stages_holds_as_many_micro_batches_as_stages_follow() -> None:
    """Four equal blocks and a small head, on four devices: the orders that the pipeline is known for."""
    hardware = Hardware.cpu(num_devices=4)
    draft = draft_of(chain(depth=4, width=128, rows=64), hardware, micro_batches=6)
    apply(draft, *one_forward_one_backward())
    assert [turns(p) for p in draft.programs] == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


@pytest.mark.slow
def test_it_takes_as_long_as_fill_and_drain_and_less_memory() -> None:
    graph, hardware = chain(depth=8, width=256, rows=64), Hardware.cpu(num_devices=4)
    figures = []
    for passes in (to_schedule(), one_forward_one_backward()):
        draft = apply(draft_of(graph, hardware, micro_batches=16), *passes)
        peaks = [profile_memory(p).peak_bytes[ops.DEVICE] for p in draft.programs]
        figures.append((simulate(draft.programs, hardware).step_s, peaks))
    (drained_s, drained), (alternating_s, alternating) = figures
    assert alternating_s < 1.05 * drained_s  # a message each way lies between two turns of a pair
    assert all(a < b for a, b in zip(alternating, drained)) and alternating[-1] < 0.8 * drained[-1]


@pytest.mark.parametrize("name", slow_but(("gpt2",), ["gpt2", "t5"]))
def test_training_is_bit_for_bit_that_of_fill_and_drain(name: str) -> None:
    graph, batches = trace_case(name)
    runs = []
    for passes in (to_schedule(4), one_forward_one_backward(4)):
        draft = draft_of(graph, micro_batches=3, max_grad_norm=1.0)
        apply(draft, *passes, InsertRemat(), InsertFetch(), InsertOptimizer())
        runs.append(assert_trains_like_eager(draft, batches, tolerance=1e-6))
    first, second = (run.weights() for run in runs)
    assert all((first[key] == second[key]).all() for key in first)


@pytest.mark.slow
def test_swapped_stages() -> None:
    """A device whose stages do not fit fetches each for its turns."""
    hardware = Hardware.cpu(num_devices=2, memory="32kB")
    passes = [*one_forward_one_backward(8), InsertRemat(), InsertFetch(), InsertOptimizer()]
    draft = apply(draft_of(chain(depth=7), hardware, micro_batches=3), *passes, memory=True)
    assert {n.target for p in draft.programs for n in p.ops()} >= {ops.fetch, ops.offload}
    verify(evaluation_programs(draft, {s.spec.name: {} for s in draft.stages}), hardware)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_cut_and_no_mapping_deadlocks(data: st.DataObject) -> None:
    """Each device does the backwards of a micro-batch from its last stage to its first, whatever could begin sooner."""
    draft = draft_of(trace_case("t5")[0], micro_batches=data.draw(st.integers(1, 5)))
    apply(draft, *to_schedule()[:1])
    names = [block.name for block in draft.blocks]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(names) - 1))))
    num_devices = data.draw(st.integers(1, 4))
    draft.machine = Hardware.cpu(num_devices=num_devices)
    devices = data.draw(st.lists(st.integers(0, num_devices - 1), min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    decisions = {"stages": cut(names, cuts), "devices": devices}
    apply(draft, *one_forward_one_backward()[1:], decisions=decisions)
    places = {stage.spec.name: place for place, stage in enumerate(draft.stages)}
    for program in draft.programs:
        backwards = [node for node in program.ops() if node.target is ops.backward]
        turns = [(node.kwargs["micro_batch"], -places[str(node.args[0])]) for node in backwards]
        assert sorted(turns, key=lambda turn: turn[0]) == sorted(turns)


def test_one_device_does_one_micro_batch_after_the_other() -> None:
    hardware = Hardware.cpu(num_devices=1)
    draft = apply(draft_of(chain(), hardware, micro_batches=3), *one_forward_one_backward(1))
    assert turns(draft.programs[0]) == "F0 B0 F1 B1 F2 B2"
