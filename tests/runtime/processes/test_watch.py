"""The worker to blame when signs of life stop: a stopped or silent one, never one that only waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from penstock.runtime.processes import watch
from penstock.runtime.processes.watch import Lost, WorkerWatch
from penstock.runtime.processes.wire import LOOK_S

OWN, MEETING = 11, 12  # lines of a file: of a computation, of a receive


@dataclass
class Scripted:
    """Stands for a worker: what its board and the kernel say."""

    board: list[int] = field(default_factory=lambda: [0, 0])
    state: str = psutil.STATUS_SLEEPING
    switches: int = 0

    def lines_under_way(self) -> set[int]:
        return {line for line in self.board if line > 0}

    def position(self) -> tuple[str, str]:
        return f"line {max(self.board)}", ""

    def status(self) -> str:
        return self.state

    def activity(self) -> tuple[float, ...]:
        return (float(self.switches),)


@dataclass
class Clock:
    now_s: float = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(watch, "time", clock)
    yield clock


def watch_over(*workers: Scripted, command: str = "run_step", patience_s: float = 4.0) -> WorkerWatch:
    made: list[Any] = list(workers)
    found = WorkerWatch(made, [{MEETING}] * len(workers), patience_s)
    found.begin(command)
    return found


def wait(found: WorkerWatch, clock: Clock, seconds: float, devices: tuple[int, ...] = (0, 1)) -> None:
    for _ in range(round(seconds / LOOK_S)):
        clock.now_s += LOOK_S
        found.look(devices)


def lose(found: WorkerWatch, clock: Clock, devices: tuple[int, ...] = (0, 1)) -> Lost:
    wait(found, clock, 3.5, devices)
    with pytest.raises(Lost) as caught:
        wait(found, clock, 2.0, devices)
    return caught.value


@pytest.mark.parametrize("stopped", [0, 1])
@pytest.mark.parametrize("line", [OWN, MEETING, -OWN, 0])
def test_a_stopped_worker_is_to_blame_wherever_it_was(stopped: int, line: int, clock: Clock) -> None:
    workers = [Scripted([MEETING, -OWN]), Scripted([MEETING, -OWN])]
    workers[stopped] = Scripted([line, 0], psutil.STATUS_STOPPED)
    error = lose(watch_over(*workers), clock)
    assert error.device == stopped and error.what.startswith("is stopped (SIGSTOP) and has shown no sign of life for 4")


def test_an_instruction_that_hangs_is_to_blame_not_who_waits_for_it(clock: Clock) -> None:
    """That its process uses the CPU is no sign of life while a line is under way."""
    hung = Scripted([-MEETING, OWN])
    found = watch_over(Scripted([MEETING, -OWN]), hung)
    for _ in range(10):
        hung.switches += 1
        wait(found, clock, LOOK_S)
    with pytest.raises(Lost, match="larger timeout_s") as caught:
        wait(found, clock, 2.5)
    assert caught.value.device == 1


def test_short_instructions_make_a_long_step(clock: Clock) -> None:
    busy = Scripted([OWN, 0])
    found = watch_over(busy, Scripted([MEETING, 0]))  # the other one waits for all of the step
    for line in range(1, 30):
        busy.board[0] = line * (-1) ** line
        wait(found, clock, 3.0)


@pytest.mark.parametrize("command", ["run_step", "write_shard", "set_up"])
def test_between_instructions_and_in_other_commands_the_cpu_counts(command: str, clock: Clock) -> None:
    workers = Scripted([-OWN, 0]), Scripted([-OWN, 0])
    found = watch_over(*workers, command=command)
    for _ in range(10):
        wait(found, clock, 3.0)
        for worker in workers:
            worker.switches += 1
    wait(found, clock, LOOK_S)
    assert lose(found, clock).device == 0


def test_where_all_wait_for_each_other_all_are_shown(clock: Clock) -> None:
    error = lose(watch_over(Scripted([MEETING, 0]), Scripted([MEETING, 0])), clock)
    assert "has waited for other devices for 4 s; the others wait too: 1 line 12" in error.what


def test_bytes_are_signs_of_life(clock: Clock) -> None:
    found = watch_over(Scripted([OWN, 0]))
    for left_bytes in range(30, 0, -1):
        wait(found, clock, 3.0, (0,))
        found.idle(0)(left_bytes)
    assert lose(found, clock, (0,)).device == 0


def test_a_script_that_was_stopped_itself_loses_nobody(clock: Clock) -> None:
    found = watch_over(Scripted([OWN, 0]), Scripted([MEETING, 0]))
    wait(found, clock, 2.0)
    clock.now_s += 3600
    found.look((0, 1))
    wait(found, clock, 1.0)
