"""Ranks of torchrun count over the whole batch, of which each may hold only its rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.compiler.job.counts import merge_lanes
from penstock.ir.errors import BatchError
from penstock.ir.program import Interface
from penstock.runtime.processes.local import worker_environment
from penstock.tests.compiler.loss import counted_rank
from penstock.tests.compiler.loss.rules import Loss, class_weights, rows
from penstock.tests.compiler.loss.whole_batch import Step, eager_step


def torchrun(ranks: int, folder: Path, *words: str) -> list[dict[str, Any]]:
    """The findings of each rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(Path(counted_rank.__file__)), str(folder), *words]
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("ranks,words", [(2, ("data-parallel",)), (2, ("data-parallel", "whole")), (4, ("hybrid",))])
def test_ranks_count_together(tmp_path: Path, ranks: int, words: tuple[str, ...]) -> None:
    """One lane has nothing to count, and in `hybrid` the first stages have no labels."""
    wanted = eager_step(Loss(class_weights), rows(counted_rank.COUNTS))
    for found in torchrun(ranks, tmp_path, *words):
        gradients = {name: torch.tensor(value) for name, value in found["gradients"].items()}
        assert Step(found["loss"], gradients).distance(wanted) <= 1e-5
        assert found["evaluated"] == pytest.approx(wanted.loss, rel=1e-5)
        assert "items" not in found["inputs"]


def test_a_lane_is_counted_by_whichever_of_its_ranks_has_labels() -> None:
    interface = Interface({}, {}, num_devices=2, micro_batches=2, lanes=((0, 2), (1, 3)))
    assert merge_lanes([None, [[3.0], [4.0]], [[1.0], [2.0]], None], interface) == [[1.0], [2.0], [3.0], [4.0]]
    with pytest.raises(BatchError, match="none of ranks 1, 3 was given what the loss counts"):
        merge_lanes([None, None, [[1.0], [2.0]], None], interface)
