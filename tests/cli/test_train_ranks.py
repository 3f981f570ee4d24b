"""`penstock train` under torchrun, on real text: each rank takes its own rows, and any number of ranks goes on."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import signal
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from penstock.cli.options import TrainOptions
from penstock.cli.training import train
from penstock.runtime.processes.local import worker_environment

GPT = "gpt2:n_layer=2,n_embd=32,n_head=4,vocab_size=256,n_positions=64"
FIXED = ["--batch", "8", "--sequence", "32", "--micro-batches", "4", "--no-dropout", "--lr", "0.01"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "topics.txt"
    path.write_text("\n".join(pydoc_data.topics.topics.values())[:30_000])
    return path


def start(ranks: int, text: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    command += ["penstock.cli.main", "train", "--model", GPT, "--data", str(text), "--out", str(out)]
    command += ["--hardware", "cpu", "--set", f"num_devices={ranks}", *FIXED, *more]
    return subprocess.Popen(
        command, env=worker_environment(1), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> str:
    """End the process and return its output. Nothing is left running, whatever happens."""
    try:
        said, errors = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors
    return said


def alone(text: Path, out: Path, max_steps: int, resume: bool = False) -> tuple[list[float], str]:
    options = TrainOptions(
        model=GPT, data=[text], out=out, hardware=["cpu"], batch=8, sequence=32, micro_batches=4,
        dropout=False, lr=0.01, set=["num_devices=1"], max_steps=max_steps, resume=resume, eval_fraction=0.1,
    )  # fmt: skip
    screen = Console(file=StringIO(), width=200)
    return train(options, screen).losses, screen.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("strategy", ["data-parallel", "gpipe", "auto"])
def test_two_ranks_begin_and_one_goes_on(strategy: str, text: Path, tmp_path: Path) -> None:
    losses, _ = alone(text, tmp_path / "whole", 6)
    more = ("--strategy", strategy, "--max-steps", "4", "--eval-fraction", "0.1", "--logger", "jsonl")
    said = finish(start(2, text, tmp_path / "parts", *more))
    rows = [json.loads(line) for line in (tmp_path / "parts" / "logs" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["event"] == "step"] == [1, 2, 3, 4]  # once, not for each rank
    assert [row["event"] for row in rows].count("evaluation") == 2
    assert said.count("step 4 of 4") == 1 and said.count("held-out rows") == 2  # one rank speaks
    rest, said = alone(text, tmp_path / "parts", 6, resume=True)
    assert "resumed at step 4, sample 32" in said
    assert rest == pytest.approx(losses[4:], rel=1e-4)


@pytest.mark.slow
@pytest.mark.multi
def test_ctrl_c_stops_all_ranks_after_the_same_step(text: Path, tmp_path: Path) -> None:
    more = ("--strategy", "data-parallel", "--max-steps", "100000", "--save-every", "1", "--eval-fraction", "0.1")
    process = start(2, text, tmp_path / "out", *more)
    checkpoint, deadline_s = tmp_path / "out" / "checkpoint", time.monotonic() + 100
    while not checkpoint.exists() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the agent and both ranks
    said, errors = process.communicate(timeout=100)
    assert "stopped at step" in said and "--resume goes on from it" in said, errors
    assert "; 0 steps not saved" in said and "Traceback" not in said
    _, resumed = alone(text, tmp_path / "out", 1, resume=True)
    assert "resumed at step" in resumed
