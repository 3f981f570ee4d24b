"""Under torchrun changes between steps are those of all ranks; what one rank changes alone is told on all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.processes.local import worker_environment

pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.mark.parametrize(
    "strategy, alone, told",
    [
        ("1f1b", "modules", "rank 1: modules of the model: Tanh before, Identity now"),
        ("zero3-offload", "weights", "weights that were changed` on rank 1"),
    ],
)
def test_ranks_that_change_alike_train_as_eager(tmp_path: Path, strategy: str, alone: str, told: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    command += ["penstock.tests.compiler.job.changes.changing_rank", str(tmp_path), strategy, alone]
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, text=True, timeout=200)
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank*.json"))]
    assert len(rows) == 2, done.stderr[-4000:]
    for row in rows:
        assert row["difference"] < 1e-7  # a weight that stays changes the loss by a tenth
        assert told in row["error"]
