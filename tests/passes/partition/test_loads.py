"""`Loads`: of runs of blocks what `Slices` says, of other sets what a stage of them takes."""

from __future__ import annotations

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.passes.partition.loads import Loads
from penstock.passes.partition.slices import Slices
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.running import apply, chain, draft_of, trace_case


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_runs_need_what_slices_say(name: str) -> None:
    draft = apply(draft_of(trace_case(name)[0], micro_batches=3), Coarsen())
    loads, slices = Loads(draft), Slices(draft)
    for a in range(len(draft.blocks)):
        for b in range(a + 1, len(draft.blocks) + 1):
            assert loads.need(tuple(range(a, b))) == slices.needs[b][a]
            assert loads.need_bytes([tuple(range(a, b))]) == slices.need_bytes(a, b, 0, 1)


def test_runs_that_are_too_large_for_every_device_are_not_counted_exactly() -> None:
    draft = apply(draft_of(trace_case("gpt2")[0], micro_batches=3), Coarsen())
    exact = Slices(draft)
    some_bytes = exact.needs[2][0].work_bytes
    device = draft.machine.devices[0].model_copy(update={"memory_bytes": some_bytes, "reserve": None})
    draft.machine = draft.machine.model_copy(update={"devices": [device] * len(draft.machine.devices)})
    few = Slices(draft)
    most_bytes = few.devices[0].budget_bytes
    too_large = 0
    for end, row in enumerate(exact.needs):
        for start, need in enumerate(row):
            if need.work_bytes <= most_bytes:
                assert few.needs[end][start] == need and few.earliest[end] <= start
            else:
                assert few.needs[end][start].work_bytes > most_bytes
                too_large += few.needs[end][start] != need
    assert too_large


def test_a_device_needs_its_largest_stage_and_the_inputs_of_all() -> None:
    loads = Loads(apply(draft_of(chain(), micro_batches=3), Coarsen()))
    first, second = loads.need((1,)), loads.need((2, 3))
    held = 3 * (first.input_bytes + second.input_bytes)
    assert loads.need_bytes([(1,), (2, 3)]) == held + second.work_bytes + 2 * second.input_bytes
    assert loads.need_bytes([]) == 0


def test_messages() -> None:
    """A chain of 2 x 16 floats sends the value and its gradient over each cut."""
    loads = Loads(apply(draft_of(chain()), Coarsen()))
    assert loads.crossing_bytes() == [0, 256, 256, 256, 256, 0]
    hardware = Hardware.cpu(num_devices=2, link="1MB/s")
    loads = Loads(apply(draft_of(chain(), hardware), Coarsen()))
    more_s = loads.message_s(0, 1, 512) - loads.message_s(0, 1, 256)
    assert more_s == pytest.approx(256 / hardware.bandwidth("cpu0", "cpu1"))
    assert loads.message_s(0, 1, 1e-9) == pytest.approx(2 * hardware.latency_s("cpu0", "cpu1"))
    assert loads.message_s(0, 0, 256) == loads.message_s(0, 1, 0) == 0.0
