"""Buffers that forward updates whatever the rows are: every micro-batch of a step begins with the same values, so that
the losses, weights and buffers are those of one forward over the whole batch. Others leave "auto" one micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm

import penstock
from penstock.compiler.strategies import STRATEGIES
from penstock.tests.compiler.reasons import reasons_of

ROWS, WIDTH, STEPS = 8, 8, 3
TOLERANCE = 1e-5  # fp32: the same terms are added up in another order


class Net(nn.Module):
    def __init__(self, use: Callable[[Net, Tensor], Tensor], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(WIDTH, WIDTH), layer or nn.Linear(WIDTH, WIDTH)
        self.last, self.use = nn.Linear(WIDTH, WIDTH), use
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(self.first(x).tanh())
        return F.cross_entropy(self.last(self.use(self, h).tanh()), y)


def anneal(net: Net, h: Tensor) -> Tensor:
    before = h * net.steps.clone()  # which backward needs
    net.steps += 1
    return before + h / (1 + net.steps)


def replace(net: Net, h: Tensor) -> Tensor:
    net.steps = 0.5 * net.steps + 1.0
    return h * net.steps


def average_of_weights(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.lerp_(net.last.weight.mean(0), 0.5)
        net.steps.add_(net.mean.norm())
    return h + net.mean * net.steps


def only_later(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():  # its first forward leaves it as it is
        net.mean.add_((net.steps > 0).float())
        net.steps.add_(1)
    return h + net.mean


def as_it_is(net: Net, h: Tensor) -> Tensor:
    return h


REPEATED: dict[str, Callable[[], Net]] = {
    "anneal": lambda: Net(anneal),
    "replace": lambda: Net(replace),
    "average of weights": lambda: Net(average_of_weights),
    "only later": lambda: Net(only_later),
    "spectral norm": lambda: Net(as_it_is, spectral_norm(nn.Linear(WIDTH, WIDTH))),
    "old spectral norm": lambda: Net(as_it_is, old_spectral_norm(nn.Linear(WIDTH, WIDTH))),
}


def count_rows(net: Net, h: Tensor) -> Tensor:
    net.steps += h.shape[0]
    return h / (1 + net.steps)


def running_mean(net: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        net.mean.lerp_(h.mean(0), 0.1)
    return h


def noise(net: Net, h: Tensor) -> Tensor:
    net.mean = torch.rand(WIDTH)
    return h + net.mean


def sizes_of_zeros(net: Net, h: Tensor) -> Tensor:
    net.steps += torch.ones_like(h[:, 0]).sum()
    return h / (1 + net.steps)


def batch(seed: int = 0) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=made), "y": torch.randint(0, WIDTH, (ROWS,), generator=made)
    }  # fmt: skip


OPTIMIZER = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def train_eager(net: Net) -> tuple[list[float], dict[str, Tensor]]:
    optimizer, losses = OPTIMIZER(net.parameters()), []
    for step in range(STEPS):
        loss = net(**batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, net.state_dict()


def compile_job(net: Net, devices: int, **options: Any) -> penstock.Job:
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="64MB", dram="1GB")
    return penstock.compile(net, hardware, example_inputs=batch(), optimizer=OPTIMIZER, search_s=1, **options)


@pytest.mark.parametrize(
    ("devices", "strategy", "micro_batches"),
    [
        (1, "balanced", 4),
        *(pytest.param(2, name, m, marks=pytest.mark.slow) for name in ("gpipe", "1f1b", "mobius") for m in (2, 4)),
    ],
)
@pytest.mark.parametrize("name", REPEATED)
def test_a_step_updates_them_once(name: str, devices: int, strategy: str, micro_batches: int) -> None:
    torch.manual_seed(0)
    net = REPEATED[name]()
    losses, weights = train_eager(copy.deepcopy(net))
    with compile_job(net, devices, strategy=strategy, micro_batches=micro_batches) as job:
        found = [float(job.step(batch(step))) for step in range(STEPS)]
        assert "a step updates them once" in " ".join(reasons_of(job).split())
        job.sync()
    assert found == pytest.approx(losses, rel=TOLERANCE)
    for key, wanted in weights.items():
        torch.testing.assert_close(net.state_dict()[key], wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("use", [count_rows, running_mean, noise, sizes_of_zeros])
def test_what_rows_or_chance_influence_leaves_auto_one_micro_batch(use: Callable[[Net, Tensor], Tensor]) -> None:
    with compile_job(Net(use), 2, strategy="balanced") as job:
        assert job.plan.micro_batches == 1
    with compile_job(Net(use), 1, strategy="balanced", micro_batches=2) as job:
        text = " ".join(reasons_of(job).split())
        assert "forward updates the buffer" in text and "a step updates them once" not in text


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_an_evaluation_updates_them_once_and_a_resume_brings_them_back(micro_batches: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net(anneal)
    eager = copy.deepcopy(net)
    with compile_job(net, 1, strategy="balanced", micro_batches=micro_batches) as job:
        job.save(tmp_path / "start")
        for _ in range(2):
            wanted = copy.deepcopy(eager).eval()(**batch(9))
            assert float(job.evaluate(batch(9)).loss) == pytest.approx(wanted.item(), rel=TOLERANCE)
            assert job.state_dict()["steps"] == 1
            job.resume(tmp_path / "start")
        assert float(job.step(batch(0))) == pytest.approx(eager(**batch(0)).item(), rel=TOLERANCE)


def test_auto_may_take_several_micro_batches() -> None:
    with compile_job(Net(anneal), 1) as job:
        assert not job.folder.settings.rows.couplings
        assert job.folder.settings.rows.repeated_buffers == ("steps",)


def test_a_mini_batch_of_an_asynchronous_plan_couples_them() -> None:
    with compile_job(Net(anneal), 2, strategy=STRATEGIES["async"] + "{accumulate=2}", micro_batches=4) as job:
        assert [coupling.operator for coupling in job.folder.settings.rows.couplings] == ["steps"]
