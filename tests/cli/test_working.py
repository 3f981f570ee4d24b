"""The progress of planning is shown on a terminal, and nowhere else."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from penstock.cli.working import SEARCH, working


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Console:
    found = Console(file=io.StringIO(), force_terminal=request.param, width=80)
    monkeypatch.setattr("penstock.cli.working.Console", lambda **options: found)
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
    assert screen.is_terminal or shown == "first\nsecond\n"
    assert (logger.level, list(logger.handlers)) == before
