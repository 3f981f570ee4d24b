"""The progress of planning is shown on a terminal; a pipe hears of it after seconds, and of each other plan."""

from __future__ import annotations

import io
import logging
import time
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.terminal.working import SEARCH, working
from penstock.compiler.search.attempts import Progress


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    found = Console(file=io.StringIO(), force_terminal=request.param, width=160)
    monkeypatch.setattr("penstock.cli.terminal.working.Console", lambda **options: found)
    return found


def test_a_terminal_shows_what_is_planned_and_how_far_it_is(screen: Console) -> None:
    logger = logging.getLogger(SEARCH)
    before = (logger.level, list(logger.handlers))
    assert isinstance(screen.file, io.StringIO)
    with pytest.raises(KeyboardInterrupt), working() as tell:
        logger.info("3 plans tried")
        screen.print("first")
        tell("with --batch 8")
        logger.info("4 plans tried")
        screen.print("second")
        raise KeyboardInterrupt
    shown = screen.file.getvalue()
    for line in ("planning: 3 plans tried", "planning with --batch 8: 4 plans tried"):
        assert (line in shown) == screen.is_terminal
    assert screen.is_terminal or shown == "first\nplanning with --batch 8\nsecond\n"
    assert (logger.level, list(logger.handlers)) == before


def test_a_pipe_hears_of_planning_that_takes_seconds(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr("penstock.cli.terminal.working.NOTICE_S", 0.0)
    with working():
        for _ in range(100):
            time.sleep(0.05)
            if said := capfd.readouterr().err:
                break
    assert said.startswith("planning; ")
    monkeypatch.setattr("penstock.cli.terminal.working.NOTICE_S", 0.1)
    with working():
        pass
    time.sleep(0.3)
    assert capfd.readouterr().err == ""


def test_the_first_plan_that_fits_is_answered_at_once_and_better_ones_replace_it(
    screen: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rates are of the best step so far and of the bound; alternatives have other batches, so none is told."""
    logger, asked = logging.getLogger(SEARCH), []
    assert isinstance(screen.file, io.StringIO)

    def items() -> tuple[int, str]:
        asked.append(1)
        return 2048, "token"

    with working(items) as tell:
        monkeypatch.setattr("penstock.cli.terminal.working.NOTICE_S", 0.0)
        for progress in (
            Progress(1, 4.0, 0.5, is_asked=False),
            Progress(1, None, 0.5),
            Progress(2, 4.0, 0.0),
            Progress(3, 2.0, 0.5),
        ):
            logger.info(progress)
            screen.print("next")  # draws the line
        tell("with --batch 8")
        logger.info(Progress(4, 4.0, 0.5))
        screen.print("last")
    shown = " ".join(screen.file.getvalue().split())
    first = "fits; 512 or more tokens a second; so far 2 plans tried, the best takes 4.00 s"
    for line in (
        "planning: 1 plan tried, none fits so far",
        f"planning: {first}",
        "planning: fits; between 1,024 and 4,096 tokens a second; so far 3 plans tried, the best takes 2.00 s",
        "planning with --batch 8: 4 plans tried, the best takes 4.00 s",
    ):
        assert (line in shown) == screen.is_terminal
    assert screen.is_terminal or shown == f"next next {first} next next planning with --batch 8 last"
    assert len(asked) == 1
