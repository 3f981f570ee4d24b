"""The view in a terminal and the lines in a file, as text of a recorded console."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from io import StringIO

import pytest
from rich.console import Console

from penstock.tests.golden_text import Golden
from penstock.tests.training.live.told import OFFER, Clock, facts_of_run, record, tell
from penstock.training.listener import Listener
from penstock.training.live.lines import ProgressLines
from penstock.training.live.picture import picture
from penstock.training.live.state import RunState, Snapshot
from penstock.training.live.terminal import REFRESHES_PER_S, TerminalView, view_on


def terminal(width: int = 100, height: int = 30) -> Console:
    return Console(file=StringIO(), width=width, height=height, force_terminal=True, record=True, _environ={})


def show(listener: Listener, screen: Console) -> str:
    """The view as it looks now, without the blanks at the ends of lines."""
    screen.print(listener)
    return "".join(f"{line.rstrip()}\n" for line in screen.export_text().splitlines())


def test_a_run_under_way(golden: Golden) -> None:
    screen, clock = terminal(), Clock()
    view = TerminalView(screen, RunState(clock))
    view.state.begin(facts_of_run())
    golden(show(view, screen), "before-the-first-step")
    tell(view, clock, range(1, 121))
    view.evaluated(100, {"loss": 2.3, "accuracy": 0.91})
    golden(show(view, screen), "under-way")


def test_a_run_that_was_stopped_on_one_device(golden: Golden) -> None:
    screen, clock = terminal(), Clock()
    view = TerminalView(screen, RunState(clock))
    view.state.begin(facts_of_run(1))
    tell(view, clock, range(1, 4), 1)
    view.state.end(interrupted=True)
    golden(show(view, screen), "stopped-on-one-device")


@pytest.mark.parametrize(
    ("width", "height", "num_devices"), [(100, 30, 1), (100, 30, 32), (100, 12, 4), (60, 20, 8), (20, 8, 2)]
)
def test_it_fits_any_screen(width: int, height: int, num_devices: int) -> None:
    screen, clock = terminal(width, height), Clock()
    view = TerminalView(screen, RunState(clock))
    view.state.begin(facts_of_run(num_devices))
    tell(view, clock, range(1, 30), num_devices)
    view.state.evaluated(10, {"loss": 2.0})
    view.offered(OFFER)
    text = picture(view.state.snapshot(), width, height - 1)
    lines = text.plain.split("\n")
    assert len(lines) <= height - 1 and all(len(line) <= width for line in lines)
    assert lines[0].startswith("step 29 of 200") and ("gpu0" in text.plain or height < 10)
    if height == 30:
        assert lines[-1] == "slower than planned, at step 75: gpu1 takes 2.5x as long as planned"
    whole = picture(view.state.snapshot(), 200, 30).plain.split("\n")[1]
    assert width < 30 or set(lines[1].split("   ")) <= set(whole.split("   "))
    if num_devices == 8:
        assert "more devices; slowest device: gpu0, compute 80%" in text.plain, text.plain
    if num_devices == 32:
        assert "24 more devices; slowest device: gpu0" in text.plain, text.plain


def test_richs_own_thread_draws_and_the_last_picture_stays() -> None:
    screen, clock = terminal(), Clock()
    drawn = set[int]()

    class Noted(RunState):
        def snapshot(self) -> Snapshot:
            drawn.add(threading.get_ident())
            return super().snapshot()

    view = TerminalView(screen, Noted(clock))
    view.begin(facts_of_run())
    drawn.clear()  # `start` draws once
    tell(view, clock, range(1, 6))
    wait_until(lambda: bool(drawn))
    assert threading.get_ident() not in drawn
    screen.print("something that the run says")
    tell(view, clock, range(6, 8))
    view.end()
    written = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "something that the run says" in written and "step 7 of 200" in written.rpartition("something")[2]
    assert written.endswith("\x1b[?25h") and "ended" in written  # the cursor is back
    assert REFRESHES_PER_S <= 4


def wait_until(holds: Callable[[], bool], most_s: float = 10.0) -> None:
    end_s = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize(
    "screen",
    [
        Console(file=StringIO()),
        Console(file=StringIO(), force_terminal=True, _environ={"TERM": "dumb"}),
    ],
)
def test_files_and_simple_terminals_get_lines(screen: Console) -> None:
    assert isinstance(view_on(screen), ProgressLines)
    assert isinstance(view_on(terminal()), TerminalView)


def test_lines_are_of_the_first_step_the_last_and_every_nth(golden: Golden) -> None:
    screen, clock = Console(file=StringIO(), width=60), Clock()
    lines = ProgressLines(screen, RunState(clock))
    lines.begin(facts_of_run(total_steps=90, done_steps=30))
    tell(lines, clock, range(31, 91))
    lines.flush()
    golden(screen.file.getvalue(), "lines")  # type: ignore[attr-defined]
    lines.end()
    lines.step(record(91))  # says nothing more
    assert screen.file.getvalue().count("\n") == 17  # type: ignore[attr-defined]


def test_a_screen_that_blocks_holds_up_no_step() -> None:
    free = threading.Event()

    class Blocked(StringIO):
        def write(self, text: str) -> int:
            assert free.wait(10)
            return super().write(text)

    screen, clock = Console(file=Blocked(), width=200), Clock()
    lines = ProgressLines(screen, RunState(clock))
    lines.begin(facts_of_run(total_steps=20))
    tell(lines, clock, range(1, 21))  # would wait for the first line
    free.set()
    lines.end()
    assert [f"step {n} of 20" in screen.file.getvalue() for n in range(1, 21)] == [True] * 20  # type: ignore[attr-defined]
