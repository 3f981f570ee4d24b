"""`penstock train`: it learns, saves, resumes bit for bit, and stops in good order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import penstock
from penstock.cli.check_job import check_written
from penstock.cli.options import JobOptions
from penstock.cli.terminal.interruptible import interruptible
from penstock.cli.training import train
from penstock.compiler.job.job import Job
from penstock.ir.errors import CheckpointError, HardwareError, PenstockError, PlanError
from penstock.runtime.processes.driver import InProcessDriver
from penstock.runtime.state.durable import Lock
from penstock.runtime.state.tensor_file import TensorFile
from penstock.tests.cli.small_runs import GPT, TEXT, options, run
from penstock.training.live import lines

BERT = (
    "bert-base:hidden_size=32,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64,vocab_size=256,"
    "max_position_embeddings=64"
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def weights(out: Path) -> dict[str, torch.Tensor]:
    file = TensorFile(out / "model" / "model.safetensors")
    return {name: file.read(name) for name in file.entries}


def test_it_learns_and_says_what_it_does(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No line holds up a step: a job itself waits for its first, and saving for the last."""
    finished, finish = set[int](), InProcessDriver.finish_step

    def note(driver: InProcessDriver) -> dict[str, Any]:
        finished.add(driver.session.state.step_count)
        return finish(driver)

    monkeypatch.setattr(InProcessDriver, "finish_step", note)
    monkeypatch.setattr(lines, "LINES", 4)
    result, said = run(options(text, tmp_path / "out", eval_fraction=0.1, max_steps=12))
    assert result.steps == len(result.losses) == 12
    assert result.losses[-1] < result.losses[0] - 0.5
    assert result.after["loss"] < result.before["loss"] - 0.5
    for part in ("bytes of the text", "held out", "tokens/s", "predicted", "cpu0", "step 12 of 12", "after 12 steps"):
        assert part in said, part
    assert finished == {1, 12}
    assert [step for step in range(13) if f"step {step} of 12: loss" in said] == [1, 3, 6, 9, 12]
    assert said.index("step 9 of 12: loss") < said.index("step 12 of 12: loss") < said.index("12 steps, ")


def test_a_machine_that_is_not_here_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Neither data nor model is there."""
    chosen = options(tmp_path / "gone.txt", tmp_path / "out", model="gone", hardware=["rtx4090x1"], set=None)
    with pytest.raises(HardwareError, match=r"rtx4090x1: the plan needs 1 GPU on a host, torch \S+ sees 0 here"):
        run(chosen)
    chosen = options(tmp_path / "gone.txt", tmp_path / "out", model="gone", dram="900TB")
    with pytest.raises(HardwareError, match=r"dram0: the plan may use .* this machine has"):
        run(chosen)


@pytest.mark.slow
def test_checkpoints_that_are_kept(text: Path, tmp_path: Path) -> None:
    """The last ones, of which a run goes on from the last."""
    out, given = tmp_path / "out", {"save_every": 1, "save_total_limit": 2}
    whole, _ = run(options(text, tmp_path / "whole"))
    first, _ = run(options(text, out, max_steps=4, **given))
    assert sorted(path.name for path in (out / "checkpoint").iterdir()) == ["step-3", "step-4"]
    rest, said = run(options(text, out, resume=True, save_every=1))
    assert "resumed at step 4" in said
    assert [*first.losses, *rest.losses] == whole.losses
    assert [path.name for path in (out / "checkpoint").iterdir()] == ["step-6"]


@pytest.mark.slow
def test_what_it_leaves_can_be_used(text: Path, tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    run(options(text, tmp_path / "out"))
    model, info = GPT2LMHeadModel.from_pretrained(tmp_path / "out" / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    job = penstock.load(tmp_path / "out" / "programs", model)
    assert job.simulate().step_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(
    elastic: bool, text: Path, tmp_path: Path
) -> None:
    whole, _ = run(options(text, tmp_path / "whole", schedule="cosine"))

    class Stopped(Exception):
        """Stands for a power cut after step 4."""

    saves = Job.save
    try:
        with pytest.MonkeyPatch.context() as patch:

            def save_and_stop(job: Job, *arguments: Any, **more: Any) -> None:
                saves(job, *arguments, **more)
                raise Stopped

            patch.setattr(Job, "save", save_and_stop)
            run(options(text, tmp_path / "parts", schedule="cosine", save_every=4, elastic=elastic))
    except Stopped:
        pass
    rest, said = run(options(text, tmp_path / "parts", schedule="cosine", resume=not elastic, elastic=elastic))
    assert "resumed at step 4, sample 16" in said
    assert rest.losses == whole.losses[4:]
    found, wanted = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())


@pytest.mark.slow
def test_other_data_is_not_resumed_on(text: Path, tmp_path: Path) -> None:
    run(options(text, tmp_path / "out", max_steps=1))
    text.write_text("something else entirely, and long enough for a few rows of sixteen bytes each")
    with pytest.raises(CheckpointError, match="was saved with rows"):
        run(options(text, tmp_path / "out", max_steps=2, resume=True))


def test_a_second_run_into_one_directory_is_refused_at_its_start(text: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    first = Lock(tmp_path / "out" / ".running", "the first run")
    with pytest.raises(CheckpointError, match=rf"--out .*out: one run at a time.*process {os.getpid()} on .* does so"):
        run(options(text, tmp_path / "out", max_steps=1))
    first.drop()
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.slow
def test_a_checkpoint_is_neither_overwritten_nor_made_up(text: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        run(options(text, tmp_path / "out", resume=True))
    run(options(text, tmp_path / "out", max_steps=1))
    with pytest.raises(PlanError, match="--resume goes on from it"):
        run(options(text, tmp_path / "out"))


PACKED_TEXTS = ["the quick brown fox", "jumps over", "the lazy dog and comes back again", "a", "and again"] * 4


def packable(path: Path) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in PACKED_TEXTS))
    return path


@pytest.mark.slow
def test_it_trains_on_packed_texts(tmp_path: Path) -> None:
    """What it has written is compared with the model on other packed rows."""
    data = packable(tmp_path / "texts.jsonl")
    given = {"pack": True, "eval_fraction": 0.25, "max_steps": 4, "dropout": False}
    result, said = run(options(data, tmp_path / "out", **given))
    assert "20 documents (32 pieces) in 20 rows, 12 of 320 tokens are padding (3.8%)" in said
    assert "15 rows to train on, 5 held out" in said
    assert result.after["loss"] < result.before["loss"] - 0.1
    report = check_written(tmp_path / "out" / "programs", JobOptions(), 2)
    assert report.passed


def test_texts_of_a_classifier_are_not_packed(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--pack: classification has one row for each record"):
        run(options(write_labelled(tmp_path / "data.jsonl"), tmp_path / "out", model=BERT, pack=True))


def write_labelled(path: Path) -> Path:
    """Two kinds of lines that one byte tells apart."""
    rows = [{"text": f"{'aaaa' if i % 2 else 'zzzz'} {i}", "label": "odd" if i % 2 else "even"} for i in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.slow
def test_a_classifier_learns_its_classes(tmp_path: Path) -> None:
    data = write_labelled(tmp_path / "rows.jsonl")
    result, said = run(options(data, tmp_path / "out", model=BERT, eval_fraction=0.25, max_steps=15, dropout=False))
    assert result.after["accuracy"] == 1.0
    assert "2 classes" in said and "accuracy 100.0%" in said
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert config["id2label"] == {"0": "even", "1": "odd"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": None}, "--data FILE.txt"),
        ({"model": None}, "name a model"),
        ({"model": "t5-small"}, 'no column "target"'),
        ({"model": BERT}, 'no column "label"'),
        ({"kind": "chats"}, "--kind 'chats'.*the nearest is chat"),
        ({"column": ["text"]}, "--column 'text' is not of the form key=value"),
        ({"column": ["text=a", "text=b"]}, "--column: text is given twice"),
        ({"epochs": 0.0, "max_steps": None}, "--epochs 0: the run would have no step"),
        ({"streaming": True, "max_steps": None}, "--streaming: .*give --max-steps"),
        ({"eval_data": ["x"], "eval_fraction": 0.1}, "--eval-data and --eval-fraction"),
        ({"model": GPT.replace("vocab_size=256", "vocab_size=128")}, "the tokenizer has 256 tokens"),
        ({"eval_fraction": 0.001, "eval_every": 1}, "--eval-fraction 0.001 of 165 rows is none"),
        ({"split": "test"}, "--split test: no --data is a folder"),
        ({"sequence": 128}, "allowed are 1 to 64"),
        ({"eval_fraction": 0.9, "sequence": 60, "batch": 1, "data_text": TEXT[:70]}, "leaves no row"),
    ],
)
def test_mistakes(text: Path, tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    text.write_text(changes.pop("data_text", TEXT))
    with pytest.raises(PlanError, match=said):
        run(options(**{"data": text, "out": tmp_path / "out", **changes}))


def test_rows_to_train_on_are_not_held_out(text: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"it is trained on; .*FOLDER/test"):
        run(options(text, tmp_path / "out", eval_data=[tmp_path / "x" / ".." / text.name]))


def test_a_directory_that_cannot_be_written_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"--out .*file/out: cannot be written, as .*file is no directory"):
        run(options(tmp_path / "absent.txt", tmp_path / "file" / "out"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hardware": ["abacus"], "set": None}, "abacus"),
        ({"optimizer": "adamx"}, "no class of torch.optim"),
        ({"schedule": "steps"}, "allowed are constant, linear, cosine"),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, "--warmup-steps and --warmup-ratio: give one"),
        ({"best_by": "accuracy"}, "--best-by accuracy: without evaluations .* give --eval-every"),
        ({"gguf": "q4"}, "gguf='q4'; allowed are f32"),
        ({"gguf": "f16"}, r"gguf is not installed here: pip install 'penstock\[gguf\]'"),
    ],
)
def test_what_needs_no_data_is_told_first(
    tmp_path: Path, changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PenstockError, match=said):
        run(options(tmp_path / "absent.txt", tmp_path / "out", **changes))
    assert not (tmp_path / "out").exists()


def test_one_label_is_no_task(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "x"}')
    with pytest.raises(PlanError, match="the one label 'x'"):
        run(options(data, tmp_path / "out", model=BERT))


def test_ctrl_c_ends_after_the_step_and_says_how_to_go_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Job.step

    def interrupt(job: Job, batch: Any) -> Any:
        loss = step(job, batch)
        if job.step_count == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(Job, "step", interrupt)
        result, said = run(options(text, tmp_path / "out", save_every=1))
    assert result.interrupted and result.steps == 2
    assert "step 2 of 6: loss" in said.partition("stopped at step 2 of 6; 0 steps not saved")[0]
    assert "--resume goes on from it" in said
    assert signal.getsignal(signal.SIGINT) is before
    rest, _ = run(options(text, tmp_path / "out", save_every=1, resume=True))
    assert rest.steps == 6 and len(rest.losses) == 4


def test_the_second_ctrl_c_does_not_wait() -> None:
    screen = Console(file=StringIO(), width=200)
    with pytest.raises(KeyboardInterrupt), interruptible(screen) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(5)
        while not screen.file.getvalue():  # type: ignore[attr-defined]
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(5)
    with interruptible(screen):
        pass  # says nothing
    assert screen.file.getvalue() == "stopping after this step; once more stops at once\n"  # type: ignore[attr-defined]


@pytest.mark.slow
def test_ctrl_c_while_python_ends_changes_nothing() -> None:
    code = (
        "import atexit, os, signal, sys, types\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
        "def train(*_): raise KeyboardInterrupt\n"
        "sys.modules['penstock.cli.training'] = types.SimpleNamespace(train=train)\n"
        "from penstock.cli.main import main\n"
        "main(['train'])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 130 and not ended.stderr


@pytest.mark.slow
def test_a_failed_run_says_where_the_last_checkpoint_is(text: Path, tmp_path: Path) -> None:
    screen = Console(file=StringIO(), width=200)
    with pytest.raises(PenstockError, match="loss"):
        train(options(text, tmp_path / "out", lr=1e30, optimizer="sgd", save_every=1), screen)
    said = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "the last checkpoint is in" in said


@pytest.mark.slow
@pytest.mark.multi
def test_two_devices_train_as_one_does(text: Path, tmp_path: Path) -> None:
    one, _ = run(options(text, tmp_path / "one", dropout=False, max_steps=3))
    two, said = run(
        options(text, tmp_path / "two", dropout=False, max_steps=3, set=["num_devices=2"], strategy="gpipe")
    )
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert "cpu1" in said
