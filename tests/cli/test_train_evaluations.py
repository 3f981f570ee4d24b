"""Evaluations while training: the best model is kept, a run ends for want of better ones, also over a resumption."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from penstock.cli.best import BestSoFar
from penstock.cli.config import FILE, read_config
from penstock.cli.options import TrainOptions
from penstock.cli.schedule import schedule
from penstock.cli.training import TrainResult
from penstock.compiler.job.job import Job
from penstock.data.cache import SETTING
from penstock.ir.errors import PlanError
from penstock.runtime.processes.local import worker_environment
from penstock.runtime.state.checkpoint import find_latest
from penstock.tests.cli import small_runs
from penstock.tests.cli.small_runs import GPT, TEXT, run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def options(data: Path, out: Path, **changes: Any) -> TrainOptions:
    return small_runs.options(data, out, **{"eval_fraction": 0.1, "strategy": "mobius", **changes})


def script_losses(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> dict[float, dict[str, torch.Tensor]]:
    """Lets evaluations while training find these losses. Gives for each the weights of its step."""
    evaluate, coming, found = Job.evaluate, iter(values), dict[float, dict[str, torch.Tensor]]()

    def tell(job: Job, batch: Any, outputs: bool = True) -> Any:
        out = evaluate(job, batch, outputs)
        if job.step_count and (loss := next(coming, None)) is not None:
            job.sync()
            found[loss] = {name: value.detach().clone() for name, value in job.model.named_parameters()}
            out["loss"] = torch.tensor(loss)
        return out

    monkeypatch.setattr(Job, "evaluate", tell)
    return found


def held_out(folder: Path) -> dict[str, Any]:
    """Held-out rows that are one batch."""
    (folder / "held.txt").write_text(TEXT[:128])
    return {"eval_fraction": 0.0, "eval_data": [folder / "held.txt"], "batch": 8, "eval_every": 1}


def test_the_best_model_is_kept(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    weights = script_losses(monkeypatch, [4.0, 3.0, 5.0, 3.5])
    run(options(text, tmp_path / "out", max_steps=4, **held_out(tmp_path)))
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "best")
    for name, value in best.named_parameters():
        torch.testing.assert_close(value, weights[3.0][name], rtol=0, atol=0)
    assert not torch.equal(best.lm_head.weight, weights[3.5]["transformer.wte.weight"])
    assert read_config(tmp_path / "out" / FILE)["eval_every"] == 1


@pytest.mark.slow
def test_a_run_ends_for_want_of_better_ones(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_losses(monkeypatch, [4.0, 4.5, 4.6])
    chosen = options(text, tmp_path / "out", patience=2, max_steps=9, **held_out(tmp_path))
    result, said = run(chosen)
    assert result.steps == 3 and not result.interrupted
    assert "no better loss in 2 evaluations: ended at step 3 of 9" in said
    again, _ = run(dataclasses.replace(chosen, resume=True))
    assert again.steps == 3 and not again.losses


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "count"), [(4, 3), (3, 3)])
def test_the_last_evaluation_is_made_once(steps: int, count: int, text: Path, tmp_path: Path) -> None:
    result, said = run(options(text, tmp_path / "out", max_steps=steps, eval_every=2))
    assert said.count("held-out rows") == count
    last = [line for line in said.splitlines() if "held-out rows" in line][-1]
    assert f"loss {result.after['loss']:.4f} on" in last


def test_what_was_best_is_remembered() -> None:
    best = BestSoFar("accuracy", 2)
    found = [best.is_better({"accuracy": value}, step) for step, value in enumerate((0.5, 0.4, 0.6))]
    assert found == [True, False, True]
    again = BestSoFar("accuracy", 2)
    again.load(best.state())
    assert not again.is_better({"accuracy": 0.6}, 3) and not again.is_over
    assert not again.is_better({"accuracy": float("nan")}, 4) and again.is_over


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warm_up_is_that_of_transformers(name: str) -> None:
    from transformers import get_scheduler

    rates = []
    for make in (schedule(name, 10, 3), None):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        kind = "constant_with_warmup" if name == "constant" else name
        found = make(optimizer) if make else get_scheduler(kind, optimizer, num_warmup_steps=3, num_training_steps=10)
        own = []
        for _ in range(10):
            own.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            found.step()
        rates.append(own)
    assert rates[0] == pytest.approx(rates[1])


@pytest.mark.slow
def test_a_run_with_warm_up_resumes(text: Path, tmp_path: Path) -> None:
    given = {"schedule": "cosine", "warmup_steps": 2, "save_every": 3}
    whole, _ = run(options(text, tmp_path / "whole", **given))
    (stopped, said) = _stop(options(text, tmp_path / "parts", **{**given, "save_every": 0}), 3)
    assert stopped.interrupted and "stopped at step 3 of 6; 0 steps not saved" in said
    rest, _ = run(options(text, tmp_path / "parts", **given, resume=True))
    assert [*stopped.losses, *rest.losses] == whole.losses


def _stop(chosen: TrainOptions, step: int) -> tuple[TrainResult, str]:
    """A run that Ctrl-C ends after a step."""
    own = Job.step

    def interrupt(job: Job, batch: Any) -> Any:
        loss = own(job, batch)
        if job.step_count == step:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Job, "step", interrupt)
        return run(chosen)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval_every": 2, "eval_fraction": 0.0}, "--eval-every: no rows are held out"),
        ({"patience": 2}, "--patience: evaluations count, and there are none"),
        ({"warmup_steps": 6}, "--warmup-steps 6: the run has 6 steps"),
        ({"warmup_steps": 2, "warmup_ratio": 0.1}, "give one of them"),
        ({"best_by": "bleu"}, "allowed are loss, accuracy"),
        ({"best_by": "accuracy", "eval_every": 2}, "--best-by accuracy: text is evaluated by its loss"),
        ({"beta": 0.2}, "--beta 0.2: it is for pairs of answers, and the data is text"),
        ({"model": "Qwen/Qwen3-0.6B", "sequence": 8}, "has no weights here.*--download gets them; --model Qwen3-0.6B"),
    ],
)
def test_mistakes(text: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        run(options(text, tmp_path / "out", **changes))


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", "train", *more]


@pytest.mark.slow
def test_a_file_prints_and_runs_and_options_count_more(text: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{model: '{GPT}', dropout: false}}\ndata: {{data: {text}, sequence: 16}}\n"
        "hardware: {hardware: cpu, set: num_devices=1}\nplan: {strategy: mobius, micro_batches: 2}\n"
        f"training: {{max_steps: 2}}\nsaving: {{out: {tmp_path / 'out'}}}\n"
    )
    environment = worker_environment(1) | {SETTING: str(tmp_path / "cache")}
    print_it = command(str(config), "--lr", "1e-3", "--print-config")
    printed = subprocess.run(print_it, capture_output=True, text=True, env=environment)
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "printed.yaml").write_text(printed.stdout)
    found = read_config(tmp_path / "printed.yaml")
    assert (found["lr"], found["max_steps"], found["model"]) == (1e-3, 2, GPT)
    ran = subprocess.run(command(str(config), "--max-steps", "1"), capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert "1 step of 4 rows" in ran.stdout and "1 step, " in ran.stdout
    assert read_config(tmp_path / "out" / FILE)["max_steps"] == 1


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("moment", ["reading", "rows to train on", "plan ", "before training", "step 1 of"])
def test_ctrl_c_at_any_time_leaves_no_process(moment: str, text: Path, tmp_path: Path) -> None:
    """Two local workers. Whenever it comes: code 130, no traceback, no process left, a checkpoint if it had steps."""
    more = ["--model", GPT, "--data", str(text), "--hardware", "cpu", "--set", "num_devices=2", "--max-steps", "200000",
            "--sequence", "16", "--batch", "4", "--micro-batches", "2", "--out", str(tmp_path / "out"), "--strategy",
            "gpipe", "--eval-fraction", "0.1"]  # fmt: skip
    environment = worker_environment(1) | {SETTING: str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command(*more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    said = ""
    if moment == "reading":
        time.sleep(3.0)
    else:
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if moment in line:
                break
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    rest, _ = process.communicate(timeout=120)
    said += rest
    assert process.returncode == 130, said
    assert "Traceback" not in said
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    if moment.startswith("step"):
        assert find_latest(tmp_path / "out" / "checkpoint") is not None
        assert "0 steps not saved" in said
