"""`penstock train` tells of a slow device once, and `--resume --offered` goes on with the plan that it offers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.compiler.job.job import Job
from penstock.compiler.plan import Plan
from penstock.compiler.search.offer import Offer
from penstock.ir.errors import PlanError
from penstock.tests.cli.small_runs import TEXT, options, run
from penstock.training import watch


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_there_must_be_an_offer_and_no_other_plan(text: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"out/offer holds no offer; .* Leave --offered out"):
        run(options(text, tmp_path / "out", offered=True))
    with pytest.raises(PlanError, match=r"--offered and --plan p\.json: a run has one plan"):
        run(options(text, tmp_path / "out", offered=True, plan=Path("p.json")))


@pytest.mark.slow
@pytest.mark.multi
def test_an_offer_is_told_once_and_taken(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two workers counts as three times as slow. The losses before and after are those of one device:
    fp32 sums in another order."""
    monkeypatch.setattr(watch, "OFFER_S", 0.0)
    monkeypatch.setattr("penstock.compiler.job.job.slow_devices", lambda *_, **__: {1: 3.0})
    asked, last = list[Offer | None](), watch.WARM_STEPS + watch.LOOKED

    def offering(job: Job, *given: Any) -> Offer | None:
        asked.append(offer(job, *given))
        os.kill(os.getpid(), signal.SIGINT)  # as the person does who reads it
        return asked[-1]

    offer = Job.offer
    given = {"batch": 8, "dropout": False, "max_steps": last + 4}
    alone, _ = run(options(text, tmp_path / "alone", micro_batches=4, **given))
    monkeypatch.setattr(Job, "offer", offering)
    out = tmp_path / "out"
    two = {**given, "set": ["num_devices=2"], "micro_batches": 4, "strategy": "data-parallel", "log": ["jsonl"]}
    result, said = run(options(text, out, **two))
    assert result.interrupted and result.steps == last and len(asked) == 1 and asked[0] is not None
    found = asked[0]
    assert said.count("cpu1 takes 3.0x as long as planned: with 2 replicas, which run 3, 1 micro-batches") == 1
    assert f"{found.gain:.0%}, less" in said and "with --resume --offered" in said
    (row,) = [row for line in (out / "logs" / "log.jsonl").read_text().splitlines()
              if (row := json.loads(line))["event"] == "offer"]  # fmt: skip
    assert row["step"] == last and row["times"] == {"cpu1": 3.0} and row["plan"] == found.plan.hash

    rest, said = run(options(text, out, **two, resume=True, offered=True))
    assert f"plan {found.plan.hash}" in said and f"resumed at step {last}" in said
    assert Plan.load(out / "programs" / "plan.json").hash == found.plan.hash
    assert [*result.losses, *rest.losses] == pytest.approx(alone.losses, rel=1e-4)
    assert "offered: true" in (out / "config.yaml").read_text()


def test_the_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    assert "--offered" in capsys.readouterr().out
