"""A written folder from a stranger: looked at, it runs nothing; loaded, only what is printed; with trust, all of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.cli.main import main
from penstock.ir.errors import PlanError, VerifyError
from penstock.runtime.source.trust import TRUSTED
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, zoo_case


def compile_job(folder: Path, devices: int = 1, **options: Any) -> tuple[nn.Module, Any, Path]:
    """A model with an autograd function of its own, a batch, and the folder of its job."""
    model, batch = zoo_case("custom_function")
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="1MB")
    given = {"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced", **options}
    job = penstock.compile(model, hardware, example_inputs=batch, **given)
    return model, batch, job.write(folder / "out")


def with_canary(out: Path, canary: Path) -> None:
    file = out / "device0.py"
    file.write_text(file.read_text().replace("\nSTAGES =", f"\nopen({str(canary)!r}, 'w').close()\n\nSTAGES ="))


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_written_runs_without_trust(devices: int, tmp_path: Path) -> None:
    model, batch, out = compile_job(tmp_path, devices)
    assert "ScaledGradient.apply(" in "".join(path.read_text() for path in out.glob("device*.py"))
    eager = Eager(model)
    with penstock.load(out, model) as job:
        assert not job.driver.setup.trust.whole and "penstock.tests.zoo" in job.driver.setup.trust.modules
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 0.0 if devices == 1 else 1e-6)


def test_looking_at_a_folder_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, out = compile_job(tmp_path)
    with_canary(out, tmp_path / "canary")
    file = out / "device0.py"
    file.write_text(file.read_text().replace("import torch\n", "import no_such_module\nimport torch\n", 1))
    for command in ("simulate", "explain"):
        with pytest.raises(SystemExit) as ended:
            main([command, str(out)])
        assert not ended.value.code, capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_an_optimizer_that_does_not_work_is_refused_when_it_is_read(trust: bool, tmp_path: Path) -> None:
    model, _, out = compile_job(tmp_path)
    text = (out / "settings.json").read_text()
    for kwargs in ({"evil": 1}, {"lr": ""}):
        settings = json.loads(text)
        optimizer = json.loads(settings["optimizer"])
        optimizer["kwargs"] |= kwargs
        (out / "settings.json").write_text(json.dumps(settings | {"optimizer": json.dumps(optimizer)}))
        with pytest.raises(PlanError, match=rf"settings\.json: optimizer torch\.optim:SGD .*{next(iter(kwargs))}"):
            penstock.load(out, model, trust=trust)


def test_only_trust_runs_more_than_is_printed(tmp_path: Path) -> None:
    model, batch, out = compile_job(tmp_path)
    with_canary(out, tmp_path / "canary")
    with pytest.raises(VerifyError, match=r"device0.py:\d+: `open\(.*nothing else\. .*trust=True"):
        penstock.load(out, model)
    assert not (tmp_path / "canary").exists()
    with penstock.load(out, model, trust=True) as job:
        assert job.driver.setup.trust == TRUSTED
        job.step(batch)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_file_that_changes_after_load_is_verified_again(devices: int, tmp_path: Path) -> None:
    model, batch, out = compile_job(tmp_path, devices)
    with penstock.load(out, model) as job:
        with_canary(out, tmp_path / "canary")
        with pytest.raises(VerifyError, match="nothing else"):
            job.step(batch)
    assert not (tmp_path / "canary").exists()


def edit(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    settings = json.loads((out / "settings.json").read_text())
    optimizer = json.loads(settings["optimizer"])
    change(optimizer)
    (out / "settings.json").write_text(json.dumps({**settings, "optimizer": json.dumps(optimizer)}))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("path", "os:system", "is no torch.optim.Optimizer class"),
        ("path", "antigravity:fly", "is not imported here"),
        ("scheduler_path", "subprocess:Popen", "is no class of torch.optim.lr_scheduler"),
        ("kwargs", {"lr": "function:os:getpid"}, "argument 'lr' is a function"),
    ],
)
def test_settings_name_no_code(key: str, value: Any, said: str, tmp_path: Path) -> None:
    model, _, out = compile_job(tmp_path)
    edit(out, lambda optimizer: optimizer.update({key: value}))
    with pytest.raises(PlanError, match=f"settings.json: .*{said}"):
        penstock.load(out, model)


def halve(epoch: int) -> float:
    return 0.5**epoch


def test_a_function_as_an_argument_needs_trust(tmp_path: Path) -> None:
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=halve)
    model, batch, out = compile_job(tmp_path, lr_scheduler=schedule)
    with pytest.raises(PlanError, match=r"settings.json: argument 'lr_lambda' is a function .*trust=True"):
        penstock.load(out, model)
    eager = Eager(model, lr_scheduler=schedule)
    with penstock.load(out, model, trust=True) as job:
        for _ in range(2):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 0.0)
