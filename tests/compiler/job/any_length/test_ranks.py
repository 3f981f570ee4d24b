"""Ranks of torchrun train on batches of any length: whole ones, and lanes on lengths of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.runtime.processes.local import worker_environment
from penstock.tests.compiler.job.any_length.eager import CLOSE, Eager
from penstock.tests.compiler.job.any_length.rank_script import PARTS, WHOLE
from penstock.tests.zoo import without_cache, zoo

SCRIPT = Path(__file__).with_name("rank_script.py")


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    ("strategy", "kind"), [("gpipe", "whole"), ("data-parallel", "parts"), ("data-parallel", "whole")]
)
def test_ranks_equal_eager(strategy: str, kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    run = subprocess.run(
        [*command, str(tmp_path), strategy, kind],
        env=worker_environment(1), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    torch.manual_seed(0)
    twin = Eager(without_cache(zoo()["llama"](dropout=0.0)[0]))
    wanted = [twin.step(batch) for batch in (WHOLE if kind == "whole" else PARTS)]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.stack(wanted), **CLOSE)
    weights = json.loads((tmp_path / "rank0.json").read_text())["weights"]
    for name, param in twin.model.named_parameters():
        torch.testing.assert_close(torch.tensor(weights[name]), param.detach(), **CLOSE)
