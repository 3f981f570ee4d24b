"""Weights and buffers that the script changes between steps are those of the next step, as in eager."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import CheckpointError, PlanError, StaleModelWarning

SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
TOLERANCE = 1e-6  # of weights of about 0.3; a change that is lost moves them by 1e-2 at least


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 8), None
        self.c = nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.norm(self.a(x)) * self.scale)))).mean()


def clamp(model: nn.Module) -> None:
    with torch.no_grad():
        model.a.weight.clamp_(-0.1, 0.1)


def set_data(model: nn.Module) -> None:
    model.b.weight.data = model.b.weight.data * 0.5


def clamp_data(model: nn.Module) -> None:
    """Leaves the version as it is."""
    model.c.weight.data.clamp_(-0.05, 0.05)


def load(model: nn.Module) -> None:
    model.load_state_dict(
        {key: value * 0.9 if value.is_floating_point() else value for key, value in model.state_dict().items()}
    )


def write_buffer(model: nn.Module) -> None:
    model.scale.mul_(0.5)


def set_buffer(model: nn.Module) -> None:
    model.scale = model.scale * 0.5


def run_forward(model: nn.Module) -> None:
    """Batch norm writes its statistics without raising their version."""
    model(torch.ones(4, 8))


CHANGES = [clamp, clamp_data, set_data, load, write_buffer, set_buffer, run_forward]


def jobs_and_eager(devices: int, **options: Any) -> tuple[nn.Module, penstock.Job, nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 8)
    eager = copy.deepcopy(model)
    job = penstock.compile(
        model, penstock.Hardware.cpu(num_devices=devices), example_inputs=x, optimizer=SGD, micro_batches=1, **options
    )
    return model, job, eager, SGD(eager.parameters()), x


def step_eager(eager: nn.Module, optimizer: Any, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = eager(x)
    loss.backward()
    optimizer.step()
    return float(loss)


def check_equal(job: penstock.Job, eager: nn.Module) -> None:
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(job.state_dict()[name], value, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_changes_after_a_sync_train_as_in_eager(devices: int) -> None:
    model, job, eager, optimizer, x = jobs_and_eager(devices)
    with job:
        for change in CHANGES:
            assert float(job.step(x)) == pytest.approx(step_eager(eager, optimizer, x), abs=1e-6)
            job.sync()
            change(model)
            change(eager)
            check_equal(job, eager)
        assert float(job.evaluate(x).loss) == pytest.approx(float(eager.eval()(x)), abs=1e-6)
        eager.train()
        assert float(job.step(x)) == pytest.approx(step_eager(eager, optimizer, x), abs=1e-6)
        check_equal(job, eager)


def test_class_weights_that_change_count_anew() -> None:
    class Classes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.linear(x), labels, weight=self.weights)

    torch.manual_seed(0)
    model, batch = Classes(), {"x": torch.randn(8, 4), "labels": torch.arange(8) % 3}
    with penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1), example_inputs=batch, micro_batches=2, optimizer=SGD
    ) as job:
        job.step(batch)
        job.sync()
        model.weights.copy_(torch.tensor([5.0, 1.0, 0.5]))
        want = float(model(**batch))
        assert float(job.step(batch)) == pytest.approx(want, abs=1e-6)


def test_a_state_dict_goes_to_the_devices_and_states_of_the_optimizer_stay() -> None:
    model, job, eager, optimizer, x = jobs_and_eager(1)
    with job:
        for _ in range(2):
            job.step(x)
            step_eager(eager, optimizer, x)
            state = {
                key: value * 0.9 if value.is_floating_point() else value for key, value in job.state_dict().items()
            }
            job.load_state_dict(state)
            eager.load_state_dict(state)
        assert float(job.step(x)) == pytest.approx(step_eager(eager, optimizer, x), abs=1e-6)
        check_equal(job, eager)
        job.sync()
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=0, atol=TOLERANCE)
        for wrong, told in (
            ({"d.weight": torch.ones(1)}, "unknown: d.weight"),
            ({}, "missing: scale"),
            ({**state, "c.weight": torch.ones(2)}, r"c\.weight has shape \[2\], not \[1, 8\]"),
        ):
            with pytest.raises(CheckpointError, match=told):
                job.load_state_dict(wrong)
        job.load_state_dict({"c.bias": torch.ones(1)}, strict=False)
        assert job.state_dict()["c.bias"] == 1


def test_what_is_written_into_older_weights_is_refused_and_a_sync_says_that_it_drops_it() -> None:
    model, job, _, _, x = jobs_and_eager(1)
    with job:
        job.step(x)
        clamp(model)
        for call in (job.step, job.evaluate):
            with pytest.raises(
                PlanError, match=rf"{call.__name__}: a\.weight of the model changed .* Call job\.sync\(\)"
            ):
                call(x)
        with pytest.warns(StaleModelWarning, match=r"replaced what was written into a\.weight"):
            job.sync()
        clamp(model)
        job.step(x)
        assert job.step_count == 2


def test_older_weights_that_are_written_through_data_are_found_within_some_steps() -> None:
    model, job, _, _, x = jobs_and_eager(1)
    with job:
        job.step(x)
        clamp_data(model)
        with pytest.raises(PlanError, match=r"c\.weight of the model changed"):
            for _ in model.state_dict():
                job.step(x)
        with pytest.warns(StaleModelWarning, match=r"replaced what was written into c\.weight"):
            job.sync()


def test_another_parameter_in_its_place_is_refused() -> None:
    model, job, _, _, x = jobs_and_eager(1)
    with job:
        job.step(x)
        job.sync()
        before, model.b.weight = model.b.weight, nn.Parameter(torch.ones(8, 8))
        with pytest.raises(PlanError, match=r"b\.weight is another parameter than at the last sync"):
            job.step(x)
        model.b.weight = before
        job.step(x)


def test_elements_that_stay_keep_what_masters_know_of_them() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(8, 8).bfloat16(), torch.randn(8, 8).bfloat16()
    with penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1), example_inputs=x, optimizer=SGD, precision="bf16-true",
        strategy="balanced", micro_batches=2, loss_fn=lambda output, batch: output.float().square().mean(),
    ) as job:  # fmt: skip
        job.step(x)
        job.sync()
        before = job.state_dict()["weight"].clone()
        with torch.no_grad():
            model.weight[0] = 0.5
        after = job.state_dict()["weight"]
        assert torch.equal(after[1:], before[1:]) and bool((after[0] == 0.5).all())
        assert not torch.equal(before, before.bfloat16().float())  # or there is nothing to keep


def test_frozen_weights_that_were_changed_are_in_a_checkpoint(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), torch.randn(4, 4)
    model[0].requires_grad_(False)
    with penstock.compile(
        model, penstock.Hardware.cpu(num_devices=1), example_inputs=x, loss_fn=lambda output, batch: output.mean(),
        strategy="balanced", micro_batches=2,
    ) as job:  # fmt: skip
        job.step(x)
        job.sync()
        with torch.no_grad():
            model[0].weight.fill_(0.25)
        job.step(x)
        job.save(tmp_path / "saved")
        job.load_state_dict({"0.weight": torch.zeros(4, 4)}, strict=False)
        job.resume(tmp_path / "saved")
        assert bool((job.state_dict()["0.weight"] == 0.25).all())
