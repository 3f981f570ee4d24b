"""Under torchrun steps follow one right after another, too: a rank's report of one comes when its device is done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.processes.local import worker_environment

pytestmark = [pytest.mark.multi, pytest.mark.slow]


def run(folder: Path, *words: str, fails: bool = False) -> dict[int, dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["penstock.tests.compiler.job.steps_of_ranks", str(folder), *words]
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, text=True, timeout=200)
    assert (done.returncode != 0) == fails, done.stderr[-6000:]
    return {int(path.stem[4:]): json.loads(path.read_text()) for path in folder.glob("rank*.json")}


@pytest.mark.parametrize("strategy", ["gpipe", "data-parallel", "mobius", "clipped 1f1b"])
def test_ranks_train_as_eager_and_any_of_them_may_read_a_report(strategy: str, tmp_path: Path) -> None:
    found = run(tmp_path, "exact", strategy)
    assert found[0].pop("read") == [2] and found[1].pop("read") == [2, 3]
    assert found[0] == found[1] and found[0]["moved"]
    assert [(step, rates) for step, _, rates in found[0]["reports"]] == [(step, [0.05]) for step in range(1, 6)]


def test_what_breaks_the_end_of_a_step_on_one_rank_is_told_to_who_waits_for_its_report(tmp_path: Path) -> None:
    """And the rank itself hears of it in its next call."""
    found = run(tmp_path, "raise")
    for row in found.values():
        assert "rank 1 (on " in row["error"] or "the end of step 3" in row["error"], row
        assert "device 1" in row["error"] and "no such update" in row["error"], row
    assert found[0]["seconds"] < 30


def test_a_rank_that_dies_before_its_report_is_named(tmp_path: Path) -> None:
    found = run(tmp_path, "die", fails=True)
    assert "rank 1 (on " in found[0]["error"] and "has ended" in found[0]["error"], found[0]
    assert found[0]["seconds"] < 30


def test_a_rank_whose_script_is_over_is_there_for_the_last_step_and_its_report(tmp_path: Path) -> None:
    assert run(tmp_path, "leave")[0] == {"step": 3, "devices": ["cpu0", "cpu1"]}
