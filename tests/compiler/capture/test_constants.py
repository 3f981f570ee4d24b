"""Tensors that a model or loss function uses but does not register: they travel with the programs, and nowhere else."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.capture.trace import trace
from penstock.compiler.job.job import Job
from penstock.ir.errors import CaptureError, PlanError, VerifyError
from penstock.tests.compiler.eager_baseline import assert_close

CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 4.0])
SGD = partial(torch.optim.SGD, lr=0.1)


class Scaled(nn.Module):
    """A classifier that holds a tensor as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)
        self.scale = torch.linspace(0.5, 2.0, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x) * self.scale))


def weighted_loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["labels"], weight=CLASS_WEIGHTS)


def model_and_batch() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Scaled(), {"x": torch.randn(6, 4), "labels": torch.arange(6) % 3}


def compile_job(model: nn.Module, batch: Any, num_devices: int = 1, **options: Any) -> Job:
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="64MB", dram="1GB")
    given = {"optimizer": SGD, "loss_fn": weighted_loss, "strategy": "balanced", "micro_batches": 1, **options}
    return penstock.compile(model, hardware, example_inputs=batch, **given)


def eager_step(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    twin = copy.deepcopy(model)
    loss = weighted_loss(twin(batch["x"]), batch)
    loss.backward()
    SGD(twin.parameters()).step()
    return loss.detach(), twin.state_dict()


@pytest.mark.slow
@pytest.mark.multi
def test_written_files_carry_the_values_to_workers_that_have_no_model(tmp_path: Path) -> None:
    """The model that the files are loaded for may hold another tensor, or none: the programs hold their own."""
    model, batch = model_and_batch()
    loss, expected = eager_step(model, batch)
    job = compile_job(model, batch, num_devices=2)
    assert set(job.folder.constants) == {"scale", "CLASS_WEIGHTS"}
    job.write(tmp_path / "job")
    del model.scale
    with penstock.load(tmp_path / "job", model) as loaded:
        assert_close({"loss": loaded.step(batch)}, {"loss": loss}, 1e-6)
        assert_close(loaded.state_dict(), expected, 1e-6)
        loaded.save(tmp_path / "checkpoint")
        loaded.sync()
        loaded.resume(tmp_path / "checkpoint")
        again = loaded.evaluate(batch).loss
    assert set(model.state_dict()) == set(expected)
    model.scale = torch.linspace(0.5, 2.0, 8)
    assert_close({"loss": again}, {"loss": weighted_loss(model(batch["x"]), batch).detach()}, 1e-6)


def test_a_later_change_of_the_users_tensor_is_refused_and_changes_no_program() -> None:
    model, batch = model_and_batch()
    loss, expected = eager_step(model, batch)
    with compile_job(model, batch) as job:
        before = model.scale.clone()
        model.scale.fill_(100.0)
        with pytest.raises(PlanError, match="a tensor of the model changed"):
            job.step(batch)
        model.scale.copy_(before)
        assert_close({"loss": job.step(batch)}, {"loss": loss}, 1e-6)
        assert_close(job.state_dict(), expected, 1e-6)


def test_a_missing_or_damaged_file_of_values_is_named(tmp_path: Path) -> None:
    model, batch = model_and_batch()
    job = compile_job(model, batch)
    path = job.write(tmp_path / "job") / "constants.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(VerifyError, match=r"scale.*constants\.safetensors: truncated"):
        penstock.load(tmp_path / "job", model)
    path.unlink()
    with pytest.raises(VerifyError, match=r"constants\.safetensors"):
        penstock.load(tmp_path / "job", model)
    job.folder.constants["scale"] = torch.zeros(7)
    job.write(tmp_path / "job")
    with pytest.raises(VerifyError, match=r"'scale', float32\[8\]; the file holds F32\[7\]"):
        penstock.load(tmp_path / "job", model)


def test_a_job_without_constants_has_no_file_of_them(tmp_path: Path) -> None:
    model, batch = model_and_batch()
    compile_job(model, batch).write(tmp_path)
    plain = nn.Linear(4, 3)
    compile_job(plain, {"input": batch["x"]}, loss_fn=lambda out, _: out.square().mean()).write(tmp_path)
    assert not (tmp_path / "constants.safetensors").exists()


def test_on_meta_a_plan_is_made_and_a_run_is_refused() -> None:
    with torch.device("meta"):
        model = Scaled()
    job = compile_job(model, {"x": {"shape": [6, 4]}, "labels": {"shape": [6], "dtype": "int64"}}, weights="nowhere")
    assert job.simulate().step_s > 0
    with pytest.raises(PlanError, match=r"scale.*meta device.*register_buffer"):
        job.step(model_and_batch()[1])


def failure(forward: Any, **attributes: Any) -> str:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            vars(self).update(attributes)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, self.linear(x))

    with pytest.raises(CaptureError) as caught:
        trace(Model(), torch.randn(3, 4))
    return str(caught.value)


def test_a_change_in_place_would_be_lost() -> None:
    def forward(model: Any, h: Tensor) -> Tensor:
        model.count[1:].add_(1)  # the line to blame
        return (h * model.count).sum()

    message = failure(forward, count=torch.zeros(4))
    assert message.startswith("test_constants.py:") and "the line to blame" in message
    assert "'count' in place" in message and "register_buffer" in message


def test_a_trainable_tensor_is_named() -> None:
    message = failure(lambda model, h: (h * model.factor).sum(), factor=torch.ones(4, requires_grad=True))
    assert "'factor'" in message and "nothing would train it" in message


def test_names_are_those_of_attributes_and_variables() -> None:
    model, batch = model_and_batch()
    own = torch.ones(3)
    model.body.head = torch.ones(8)  # type: ignore[assignment]  # the name of another module
    held = {"weights": torch.ones(3)}

    def loss_fn(output: Tensor, batch: Any) -> Tensor:
        return (output * own * held["weights"]).sum() + model.body.head.sum() * model.head.weight.sum()  # type: ignore

    assert set(trace(model, batch, loss_fn=loss_fn).constants) == {"scale", "own", "_constant0", "body_head"}
