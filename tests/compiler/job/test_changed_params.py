"""Parameters that forward changes in place keep the change, as in eager, wherever they live; or the plan is refused."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.check.check import check
from penstock.errors import CaptureError, PassError, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.tests.shown_elsewhere import slow_but

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
TOLERANCE = 1e-6  # fp32: sums of micro-batches in another order, three steps of size 0.5 on weights of size 1


class Changing(nn.Module):
    def __init__(self, change: str):
        super().__init__()
        self.change = change
        self.embed = nn.Embedding(7, 8, max_norm=0.5 if change in ("max_norm", "max_norm, tied") else None)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 7)
        if change == "clamp, tied":
            self.second.weight = self.first.weight
        if change == "max_norm, tied":
            self.head.weight = self.embed.weight
        if change == "clamp, frozen":
            self.first.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        weight = self.first.weight
        with torch.no_grad():
            if self.change.startswith("clamp"):
                weight.clamp_(-0.1, 0.1)
            elif self.change == "two":
                weight.masked_fill_(weight.abs() < 0.05, 0.0).clamp_(max=0.2)
            elif self.change == "data":
                weight.data.clamp_(-0.1, 0.1)
            elif self.change == "copy":
                weight.copy_(weight.clamp(-0.1, 0.1))
            elif self.change == "decay":
                weight.mul_(0.99)
            elif self.change == "norm":
                weight.div_(weight.norm())
            elif self.change == "batch":
                weight.clamp_(max=ids.max())
        h = self.second(self.first(self.embed(ids)).tanh()).tanh()
        if self.change == "late":
            with torch.no_grad():
                self.first.bias.clamp_(-0.1, 0.1)
        return F.cross_entropy(self.head(h), labels)


def make(change: str) -> Changing:
    torch.manual_seed(0)
    return Changing(change)


def batches() -> list[dict[str, Tensor]]:
    ids, labels = torch.randint(7, (2, 3, 8), generator=torch.Generator().manual_seed(1))
    return [{"ids": ids[i], "labels": labels[i]} for i in range(3)]


def compile_job(model: nn.Module, devices: int = 1, **options: Any) -> penstock.Job:
    hardware = Hardware.cpu(num_devices=devices)
    options = {"micro_batches": 2, "strategy": "1f1b", **options}
    return penstock.compile(model, hardware, example_inputs=batches()[0], optimizer=SGD, **options)


def assert_equals_eager(job: penstock.Job, model: Changing) -> None:
    eager = copy.deepcopy(model)
    optimizer = SGD([p for p in eager.parameters() if p.requires_grad])
    with job:
        for batch in batches():
            loss = job.step(batch)
            optimizer.zero_grad()
            want = eager(**batch)
            want.backward()
            optimizer.step()
            torch.testing.assert_close(loss, want.detach(), rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(job.state_dict(), dict(eager.state_dict()), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("change", slow_but(("clamp, tied",), ["clamp", "clamp, tied", "two", "data", "copy"]))
def test_an_elementwise_change_lasts(change: str) -> None:
    model = make(change)
    assert_equals_eager(compile_job(model), model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mobius", "mics", "zero3-offload", "data-parallel", "1f1b", "zero-bubble"])
def test_it_lasts_under_every_strategy(strategy: str) -> None:
    for change in ("clamp", "clamp, tied"):
        model = make(change)
        assert_equals_eager(compile_job(model, 2, strategy=strategy), model)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mobius-ssd", "fuyou"])
@pytest.mark.parametrize("clip", [None, 1e6])
def test_it_lasts_on_ssd(strategy: str, clip: float | None, tmp_path: Any) -> None:
    model = make("clamp")
    job = penstock.compile(
        model, Hardware.cpu(num_devices=1, ssd="1GB"), example_inputs=batches()[0], optimizer=SGD, micro_batches=2,
        strategy=strategy, max_grad_norm=clip, ssd_dirs=[tmp_path],
    )  # fmt: skip
    assert_equals_eager(job, model)


def test_masters_of_another_precision_take_the_change() -> None:
    """Tolerance: that of bf16 in one step; without the change weights of up to 0.35 would be off by 0.25."""
    model = make("clamp")
    eager = copy.deepcopy(model)
    eager(**batches()[0]).backward()
    SGD(eager.parameters()).step()
    with compile_job(model, precision="bf16") as job:
        job.step(batches()[0])
        torch.testing.assert_close(job.state_dict(), dict(eager.state_dict()), rtol=0, atol=5e-3)


def test_the_rows_that_max_norm_changes_last_where_forward_runs_on_the_weights() -> None:
    model = make("max_norm")
    assert_equals_eager(compile_job(model), model)


@pytest.mark.parametrize(
    ("change", "options", "reason"),
    [
        ("max_norm", {"strategy": "zero3-offload", "devices": 2}, "live elsewhere"),
        ("max_norm", {"strategy": "data-parallel", "devices": 2}, "rows of its own part of the batch"),
        ("max_norm", {"precision": "bf16"}, "masters are kept in fp32"),
        ("clamp, frozen", {"strategy": "zero3-offload", "devices": 2}, "live elsewhere"),
    ],
)
def test_a_plan_that_would_lose_a_change_is_refused(change: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=rf"test_changed_params\.py(?s:.*){reason}.*strategy=\"1f1b\""):
        compile_job(make(change), **options)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("decay", r"first\.weight in place, again and again"),
        ("norm", r"first\.weight in place and calls aten\.linalg_vector_norm\.default, which is not element-wise"),
        ("batch", r"first\.weight in place and uses inputs or other tensors"),
        ("late", r"first\.bias in place after it has been used"),
        ("max_norm, tied", r"embed\.weight in place"),
    ],
)
def test_what_eager_would_do_once_a_step_is_refused_with_its_line(change: str, reason: str) -> None:
    with pytest.raises(CaptureError, match=rf"test_changed_params\.py:\d+: (?s:.*){reason}.*clamp_\(-1, 1\)"):
        compile_job(make(change))


@pytest.mark.slow
def test_asynchronous_training_and_the_check() -> None:
    with pytest.raises(PassError, match=r"forward changes first\.weight in place"):
        compile_job(make("clamp"), 2, strategy="async")
    model = make("clamp")
    report = check(compile_job(model, strategy="auto"), model, batches())
    assert report.passed and report.skipped is None, report.differences
