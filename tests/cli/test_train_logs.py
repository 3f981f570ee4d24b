"""`penstock train --log`: the files of a run, of one that is resumed, and of one that breaks off."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import training
from penstock.compiler.job.job import Job
from penstock.ir.errors import PlanError
from penstock.tests.cli.test_train_command import TEXT, options, run
from penstock.training.logs.jsonl import FILE


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def rows(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "logs" / FILE).read_text().splitlines()]


@pytest.mark.slow
def test_a_run_and_its_resumption_are_one_log(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is stopped after its second step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, step = tmp_path / "out", Job.step
    chosen = {"log": ["jsonl", "tensorboard"], "eval_fraction": 0.1, "schedule": "linear", "save_every": 1}
    stop = threading.Event()

    def stopping(job: Job, batch: Any) -> Any:
        loss = step(job, batch)
        if job.step_count == 2:
            stop.set()
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(training, "interruptible", lambda _: nullcontext(stop))
        patch.setattr(Job, "step", stopping)
        first, _ = run(options(text, out, **chosen))
    assert first.interrupted
    assert [row["event"] for row in rows(out)] == ["begin", "evaluation", "step", "step", "end"]
    assert rows(out)[-1]["interrupted"]

    second, _ = run(options(text, out, resume=True, **chosen))
    found = rows(out)[5:]
    assert [row["event"] for row in found] == ["begin", *["step"] * 4, "evaluation", "end"]
    assert found[0]["done_steps"] == 2 and found[0]["config"]["lr"] == 1e-2 and not found[-1]["interrupted"]
    assert found[-2]["metrics"] == second.after and found[-2]["step"] == 6
    steps = [row for row in rows(out) if row["event"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in steps] == [*first.losses, *second.losses]
    assert [row["learning_rates"] for row in steps] == [[pytest.approx(1e-2 * (6 - n) / 6)] for n in range(6)]
    assert all(row["tokens"] == 64 and row["tokens_per_s"] > 0 for row in steps)

    read = EventAccumulator(str(out / "logs" / "tensorboard"))
    read.Reload()
    curve = [(event.step, event.value) for event in read.Scalars("train/loss")]
    assert curve == [(row["step"], pytest.approx(row["loss"], rel=1e-6)) for row in steps]
    assert [event.step for event in read.Scalars("evaluation/loss")] == [0, 6]


@pytest.mark.slow
def test_a_run_that_breaks_off_ends_its_log(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Job.step

    def fail(job: Job, batch: Any) -> Any:
        if job.step_count == 3:
            raise KeyboardInterrupt
        return step(job, batch)

    monkeypatch.setattr(Job, "step", fail)
    with pytest.raises(KeyboardInterrupt):
        run(options(text, tmp_path / "out", log=["jsonl"]))
    found = rows(tmp_path / "out")
    assert [row["event"] for row in found][:3] == ["begin", "step", "step"]
    assert found[-1]["event"] == "end" and found[-1]["interrupted"]


def test_an_unknown_logger_stops_the_command_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"--log 'wandbb': .*; the nearest is wandb"):
        run(options(tmp_path / "absent.txt", tmp_path / "out", log=["wandbb"]))
