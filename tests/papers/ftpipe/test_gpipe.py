"""A synchronous step as FTPipe's runtime takes it, against sums by hand."""

from __future__ import annotations

import pytest

from penstock.ir.machine.hardware import Hardware
from penstock.papers.ftpipe.experiments import FtPipe
from penstock.papers.ftpipe.gpipe import TimedStage, busiest_share, gpipe_s, stages_of, step_s
from penstock.papers.lab import Lab

FREE = Hardware.preset("ftpipe-2080ti", link_latency_s=0.0)
FORWARD_S, BACKWARD_S = 1.0, 2.0


def pipe(devices: list[int], num_bytes: int = 0) -> list[TimedStage]:
    """Equal stages, one after another."""
    return [
        TimedStage(device, FORWARD_S, BACKWARD_S, sources=[(number - 1, num_bytes)] if number else [])
        for number, device in enumerate(devices)
    ]


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (4, 1), (4, 4), (8, 8), (8, 3)])
def test_equal_stages_fill_and_drain_without_computing_again(stages: int, count: int) -> None:
    once = FORWARD_S + BACKWARD_S
    wanted = (stages - 1) * once + count * once + (count - 1) * FORWARD_S
    assert step_s(pipe(list(range(stages))), count, FREE) == pytest.approx(wanted)


def test_the_stages_of_one_gpu_take_turns() -> None:
    count = 4
    alone = 3 * (count * (FORWARD_S + BACKWARD_S) + (count - 1) * FORWARD_S)
    assert step_s(pipe([0, 0, 0]), count, FREE) == pytest.approx(alone)
    two = step_s(pipe([0, 1, 0, 1]), count, FREE)
    assert two < step_s(pipe([0, 0, 0, 0]), count, FREE)
    assert two >= 2 * (count * (FORWARD_S + BACKWARD_S) + (count - 1) * FORWARD_S) + FORWARD_S + BACKWARD_S


def test_messages_and_updates_are_waited_for() -> None:
    rate, latency_s = FREE.bandwidth("gpu0", "gpu1"), 0.5
    slow = FREE.with_(link_latency_s=latency_s / 2)
    stages = pipe([0, 1], round(rate))  # a message takes a second, and half a second to begin
    there_and_back = 2 * (1.0 + latency_s)
    assert step_s(stages, 1, slow) == pytest.approx(2 * (FORWARD_S + BACKWARD_S) + there_and_back)
    stages[0].step_s = 0.25
    assert step_s(stages, 1, slow) == pytest.approx(2 * (FORWARD_S + BACKWARD_S) + there_and_back + 0.25)


def test_a_value_for_several_stages_goes_to_one_after_another() -> None:
    size = round(FREE.bandwidth("gpu0", "gpu1"))
    fan = [
        TimedStage(0, 1.0, 0.0),
        TimedStage(1, 1.0, 0.0, sources=[(0, size)]),
        TimedStage(2, 1.0, 0.0, sources=[(0, size)]),
    ]
    assert step_s(fan, 1, FREE) == pytest.approx(1.0 + 2.0 + 1.0 + 1.0)


@pytest.mark.slow
def test_stages_are_those_of_a_program() -> None:
    paper = FtPipe(Lab())
    name, work, machine, line = next(iter(paper.small()))
    trial = paper.lab.trial(work, machine, line)
    assert name == "synchronous" and trial.step_s is not None
    stages = stages_of(trial)
    assert [stage.device for stage in stages] == [0, 1, 2, 3]
    assert all(stage.forward_s > 0 and stage.backward_s > 0 and stage.step_s > 0 for stage in stages)
    assert stages[0].sources == [] and all(0 in [source for source, _ in stage.sources] for stage in stages[1:2])
    found = gpipe_s(trial)
    assert found is not None and 0.5 * trial.step_s < found < trial.step_s  # as it computes less and waits less
    assert 0 < busiest_share(trial) < 1
