"""The races that `races.py` puts into copies of the code can still be put there."""

from __future__ import annotations

import pytest

from penstock.tests.fakecuda.races import RACES, ROOT, Race


@pytest.mark.parametrize("race", RACES, ids=lambda race: race.name)
def test_the_wait_that_a_race_removes_stands_once(race: Race) -> None:
    assert (ROOT / race.path).read_text("utf-8").count(race.old) == 1
    assert all((ROOT / test.partition("::")[0]).is_file() for test in race.tests)
