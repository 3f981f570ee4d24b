"""Releases of PyTorch: tested ones are taken as they are, a newer one is checked, and what fails is refused."""

from __future__ import annotations

import ast
import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import _backward

import penstock
from penstock.compiler.capture import guard
from penstock.compiler.check.release import captured_wrongly, check_release, missing_names
from penstock.ir.errors import PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.runtime import torch_names
from penstock.runtime.stage.split_backward import wrong_halves

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """Let each test ask anew about a release."""
    for known in (check_release, wrong_halves):
        known.cache_clear()
    yield
    for known in (check_release, wrong_halves):
        known.cache_clear()


class Layers(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def trained_loss(strategy: str, num_devices: int) -> tuple[float, float]:
    """The loss of a step, and that of the model in eager."""
    torch.manual_seed(0)
    model, batch = Layers(*(torch.nn.Linear(8, 8) for _ in range(4))), {"x": torch.randn(4, 8)}
    machine, wanted = Hardware.cpu(num_devices, memory="64MB", dram="256MB"), model(**batch).item()
    with penstock.compile(model, machine, example_inputs=batch, strategy=strategy, micro_batches=2) as job:
        return job.step(batch).item(), wanted


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1+cu130", "2.15.0", "of my own"])
def test_a_tested_release_is_taken_as_it_is(version: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_release(version)


def test_an_older_release_is_refused() -> None:
    with pytest.raises(PlanError, match=r"torch 2\.10\.2 is older .* install torch 2\.1\d to 2\.15"):
        check_release("2.10.2")


def test_a_newer_release_is_warned_of_once_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.warns(UserWarning) as told:
        loss, wanted = trained_loss("1f1b", 1)
        again, _ = trained_loss("1f1b", 1)
    assert loss == again == pytest.approx(wanted, rel=1e-5)
    (warning,) = (w for w in told if "newer than those" in str(w.message))
    assert "torch 2.16.0" in str(warning.message) and "found no fault" in str(warning.message)
    assert warning.filename == __file__


def test_halves_that_are_wrong_are_told_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    monkeypatch.setattr(_backward, "stage_backward_weight", lambda *_, **__: ())
    with pytest.warns(UserWarning, match="backward in two halves gives another gradient of twice"):
        check_release("2.16.0")
    with pytest.raises(PlanError, match=r"torch 2\.16\.0: its backward in two halves .* such as schedule-1f1b"):
        trained_loss("zero-bubble", 2)


def test_halves_that_fail_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_backward, "stage_backward_input")
    assert "has no torch.distributed.pipelining._backward.stage_backward_input" in wrong_halves()


def test_names_that_are_gone_are_told_and_refused_at_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_names() == ""
    monkeypatch.setitem(torch_names.LATE, "gone", ("torch._dynamo", "was_here"))
    with pytest.warns(UserWarning, match=r"found that it has no torch\._dynamo\.was_here\. What needs it is refused"):
        check_release("2.16.1")
    with pytest.raises(PlanError, match=r"has no torch\._dynamo\.was_here, which Penstock needs"):
        _ = torch_names.gone


def test_a_release_that_captures_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert captured_wrongly() == ""
    monkeypatch.setattr(guard, "redirect_taken_functions", contextlib.nullcontext)
    with pytest.raises(PlanError, match=r"torch 3\.0\.0 is newer .* captured step .* not the model's own: install"):
        check_release("3.0.0")


def test_an_old_python_is_refused_with_a_message() -> None:
    old = "import sys; sys.version_info, sys.version = (3, 9, 18), '3.9.18 (main)'; import penstock"
    found = subprocess.run([sys.executable, "-c", old], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert "ImportError: Penstock needs Python 3.10 or newer; this is Python 3.9.18" in found.stderr
    ast.parse((ROOT / "__init__.py").read_text("utf-8"), feature_version=(3, 9))
