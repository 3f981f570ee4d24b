"""A job runs gradient hooks as eager PyTorch does in one backward over the whole batch, whatever the plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.check.check import check
from penstock.errors import PassError, PlanError
from penstock.ir.machine.hardware import Hardware
from penstock.tests.shown_elsewhere import slow_but

SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
# fp32: sums of micro-batches and lanes in another order, three steps of size 0.5 on weights of size 1
TOLERANCE = 1e-6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.second(self.first(self.embed(ids)).tanh()).tanh()
        return F.cross_entropy(self.head(h), labels)


def trebles(p: Tensor) -> None:
    p.grad.mul_(3.0)


def make(hooks: bool = True) -> Tied:
    torch.manual_seed(0)
    model = Tied()
    if hooks:
        model.embed.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))  # tied: of the sum of both uses
        model.first.weight.register_hook(lambda g: torch.where(g > 0, g, 0.1 * g))
        model.second.bias.register_post_accumulate_grad_hook(trebles)
        model.second.bias.register_hook(lambda g: g.sign() * 0.01)
    return model


def batches(rows: int = 8) -> list[dict[str, Tensor]]:
    ids, labels = torch.randint(7, (2, 3, rows), generator=torch.Generator().manual_seed(1))
    return [{"ids": ids[i], "labels": labels[i]} for i in range(3)]


def by_eager(model: Tied, clip: float | None = None) -> dict[str, Tensor]:
    optimizer = SGD(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        model(**batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model.state_dict()


def compile_job(model: Tied, devices: int, clip: float | None, **options: Any) -> penstock.Job:
    options = {"optimizer": SGD, "max_grad_norm": clip, "strategy": "balanced", **options}
    return penstock.compile(model, Hardware.cpu(num_devices=devices), example_inputs=batches()[0], **options)


def assert_equals_eager(job: penstock.Job, clip: float | None) -> None:
    with job:
        for batch in batches():
            job.step(batch)
        found = job.state_dict()
    torch.testing.assert_close(found, dict(by_eager(make(), clip)), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("micro_batches", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("clip", slow_but([0.05], [None, 0.05]))
def test_one_device_runs_hooks_as_eager_does(micro_batches: int, clip: float | None) -> None:
    job = compile_job(make(), 1, clip, micro_batches=micro_batches)
    assert job.code(0).count("rt.hook(") == 1
    assert_equals_eager(job, clip)


STRATEGIES = ["mobius", "mics", "zero3-offload", "data-parallel", "zero-bubble", "1f1b", "gpipe"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_every_strategy_runs_hooks_as_eager_does(strategy: str, clip: float | None) -> None:
    assert_equals_eager(compile_job(make(), 2, clip, micro_batches=2, strategy=strategy), clip)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mobius-ssd", "fuyou"])
def test_states_on_ssd_are_stepped_on_hooked_gradients(strategy: str, tmp_path: Any) -> None:
    hardware = Hardware.cpu(num_devices=1, ssd="1GB")
    for clip in (None, 0.05):
        job = penstock.compile(
            make(), hardware, example_inputs=batches()[0], optimizer=SGD, max_grad_norm=clip, strategy=strategy,
            micro_batches=2, ssd_dirs=[tmp_path],
        )  # fmt: skip
        assert_equals_eager(job, clip)


@pytest.mark.slow
def test_a_scaled_loss_does_not_show_in_a_hook() -> None:
    """fp16 gradients are scaled; the hook's bound is on the gradient itself. Tolerance: that of fp16."""
    losses = {}
    for precision in ("fp32", "fp16"):
        model = make(hooks=False)
        model.first.weight.register_hook(lambda g: g.clamp(-0.001, 0.001))
        with compile_job(model, 1, None, micro_batches=2, precision=precision) as job:
            before = model.first.weight.detach().clone()
            losses[precision] = float(job.step(batches()[0]))
            moved = (job.state_dict()["first.weight"].float() - before).abs().max()
        assert 0.0004 < float(moved) < 0.0006  # lr 0.5 times the bound
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=1e-2)


@pytest.mark.slow
def test_a_written_plan_brings_its_hooks(tmp_path: Any) -> None:
    compile_job(make(), 1, None, micro_batches=2).write(tmp_path)
    assert_equals_eager(penstock.load(tmp_path, make(hooks=False)), None)
    assert_equals_eager(penstock.load(tmp_path, make()), None)
    other = make()
    other.first.weight.register_hook(lambda g: g * 2)
    with pytest.raises(PlanError, match=r"the gradient hooks of first\.weight are gt\(v0, 0\), .*, mul\(v3, 2\) now"):
        penstock.load(tmp_path, other)


def test_hooks_that_change_after_compile_are_refused_at_the_next_step() -> None:
    model, factors = make(hooks=False), {"scale": 0.5}
    handle = model.first.weight.register_hook(lambda g: g * factors["scale"])
    with compile_job(model, 1, None, micro_batches=1) as job:
        job.step(batches()[0])
        factors["scale"] = 0.25
        with pytest.raises(PlanError, match=r"first\.weight are mul\(v0, 0.25\) now, .* mul\(v0, 0.5\)"):
            job.step(batches()[0])
        factors["scale"] = 0.5
        job.step(batches()[0])
        handle.remove()
        with pytest.raises(PlanError, match=r"first\.weight are none now"):
            job.step(batches()[0])
        handle = model.first.weight.register_hook(lambda g: g * factors["scale"])
        job.step(batches()[0])
        model.second.weight.register_hook(lambda g: -g)
        with pytest.raises(PlanError, match=r"second\.weight are neg\(v0\) now, .* made with none"):
            job.step(batches()[0])


def test_what_has_no_gradient_of_a_whole_batch_is_refused() -> None:
    with pytest.raises(PassError, match="gradient hook, which runs on the gradient of a whole batch"):
        compile_job(make(), 2, None, micro_batches=2, strategy="async")
    model = make(hooks=False)
    model.first.weight.register_hook(lambda g: g + 0.1)
    with pytest.raises(PassError, match=r"first\.weight makes something else of zero"):
        compile_job(model, 2, None, micro_batches=2, strategy="mics")


def test_the_check_against_eager_has_the_hooks() -> None:
    model = make()
    job = compile_job(model, 1, 0.05, micro_batches=2)
    report = check(job, model, batches())
    assert report.passed and report.skipped is None, report.differences
