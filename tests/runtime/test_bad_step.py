"""Verdicts of devices on a step: bad at once, good when all that may be late have looked at their losses."""

from __future__ import annotations

from pathlib import Path

from penstock.runtime.bad_step import BadStep


def devices(path: Path, late: list[bool]) -> list[BadStep]:
    found = [BadStep.open(path / "cells", device, len(late)) for device in range(len(late))]
    for device, looks_later in zip(found, late):
        device.looks_later = looks_later
    return found


def test_a_step_is_good_when_all_gpus_with_losses_have_looked_at_them(tmp_path: Path) -> None:
    first, second, last = all_three = devices(tmp_path, [False, True, True])
    for number in (1, 2):
        for device in (second, last, first):  # an update of one waits until the others have begun
            assert second.verdict(number) is None
            device.begin()
        for device in all_three:
            assert device.verdict(number) is None
            device.pass_losses(number)  # says nothing of the first, whose losses are seen before any value leaves it
        assert [device.verdict(number) for device in all_three] == [False] * 3


def test_a_step_is_bad_for_all_as_soon_as_one_says_so_and_the_next_is_not(tmp_path: Path) -> None:
    all_three = devices(tmp_path, [False, True, True])
    for number, culprit in enumerate(all_three, 1):
        for device in all_three:
            device.begin()
        culprit.note(number, "forward", ValueError())
        culprit.pass_losses(number)  # as its host does after it has noted the step
        assert [device.verdict(number) for device in all_three] == [True] * 3
    for device in all_three:
        device.begin()
        device.pass_losses(4)
    assert [device.verdict(4) for device in all_three] == [False] * 3


def test_all_cells_are_read_at_one_time(tmp_path: Path) -> None:
    """A verdict looks at them twice: whether one says bad, and whether all have spoken."""
    first, last = devices(tmp_path, [False, True])
    cells = first._read()
    last.begin()
    last.note(1, "forward", ValueError())
    assert cells[1] == 0 and first._read()[1] == -1
