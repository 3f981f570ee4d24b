"""Every schedule on two GPUs, by workers of one process and by ranks of torchrun, trains as eager PyTorch does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from penstock.runtime.processes.local import worker_environment
from penstock.tests.gpu.rehearsal import exact, on_gpu, only_on_gpu
from penstock.tests.gpu.two_gpus import SCHEDULES, TEAMS, TURNS, is_within, train
from penstock.tests.shown_elsewhere import core_of

__all__ = ["exact"]  # a fixture
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OF_RANKS = ["1f1b", "mobius", "zero3-offload"]  # of the core, by ranks of torchrun; others by workers
pytestmark = [*on_gpu, only_on_gpu, two_gpus, pytest.mark.multi]


@pytest.mark.parametrize("strategy", core_of(("zero-bubble", "mics", "fuyou"), SCHEDULES))
def test_workers_on_two_gpus(strategy: str) -> None:
    apart = train(strategy)
    assert apart.fits("fp32"), apart


@pytest.mark.parametrize("way", [*TEAMS, *TURNS])
def test_two_gpus_as_a_team_or_in_turns_on_their_link(way: str) -> None:
    apart = train(way)
    assert is_within(apart, way), apart


@pytest.mark.parametrize(("strategy", "precision"), [("1f1b", "bf16"), ("mobius", "bf16"), ("gpipe", "fp16")])
def test_workers_on_two_gpus_in_low_precision(strategy: str, precision: str) -> None:
    apart = train(strategy, precision)
    assert apart.fits(precision), apart


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OF_RANKS, marks=pytest.mark.emulated_core),
        [name for name in SCHEDULES if name not in OF_RANKS],
        list(TEAMS),
        list(TURNS),
    ],
    ids=["core", "others", "teams", "turns"],
)
def test_ranks_of_torchrun_on_two_gpus(names: list[str]) -> None:
    """All of them one after the other in the same two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "penstock.tests.gpu.two_gpus", *names]
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for rank in range(2):
        assert [row["name"] for row in rows if row["rank"] == rank] == names
    assert all(row["within"] and row["retries"] == 0 for row in rows), rows


@pytest.mark.skipif("FAKECUDA_TORCH" not in os.environ, reason="only an emulated driver says what it loads")
@pytest.mark.parametrize("strategy", [*SCHEDULES, *TEAMS])
def test_nothing_is_loaded_while_a_message_is_under_way(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated driver refuses the first launch of a kernel beside a message, for which a real one may wait."""
    monkeypatch.setenv("FAKECUDA_LAZY", "2")
    apart = train(strategy)
    assert is_within(apart, strategy), apart
