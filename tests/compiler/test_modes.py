"""Every module trains in the mode that it is in at compile: frozen BatchNorm, dropout that is off, a model in eval."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.check.check import check
from penstock.compiler.check.eager import Eager, module_runner
from penstock.compiler.strategies import PIPELINE
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.tests.compiler.fleet_matrix import SGD, in_process, with_counts
from penstock.tests.shown_elsewhere import slow_but

STRATEGY = PIPELINE.replace("partition-balanced", "partition-balanced{stages=3}")
MICRO_BATCHES = 2
TOLERANCE = 1e-12  # fp64; gradients of micro-batches are added in one order, but kernels may see other shapes


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.drop(self.norm(self.linear(x))), 0.3, self.training)
        return x + (h if self.training else h * 0.5)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), target)


def frozen_norms(model: Model) -> None:
    for layer in model.layers:
        layer.norm.eval()


def one_layer(model: Model) -> None:
    model.layers[1].eval()


def only_dropout(model: Model) -> None:
    model.eval()
    model.layers[2].drop.train()


def whole(model: Model) -> None:
    model.eval()


MODES = [frozen_norms, one_layer, only_dropout, whole]


def model_and_batch() -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model().double()
    for layer in model.layers:
        layer.norm.running_mean.normal_()
    return model, {"x": torch.randn(8, 6, dtype=torch.float64), "target": torch.randint(3, (8,))}


def job_of(model: nn.Module, batch: dict[str, Tensor], devices: int = 2) -> penstock.Job:
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="64MB", dram="1GB")
    return penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, strategy=STRATEGY
    )


def quiet_job_of(model: nn.Module, batch: dict[str, Tensor], devices: int = 2) -> penstock.Job:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return job_of(model, batch, devices)


@pytest.mark.parametrize("set_modes", slow_but([frozen_norms, whole], MODES))
def test_losses_gradients_weights_and_statistics_are_eagers(set_modes) -> None:  # type: ignore[no-untyped-def]
    model, batch = model_and_batch()
    set_modes(model)
    flags = [module.training for module in model.modules()]
    job = quiet_job_of(model, batch)
    machine, given = in_process(job, model), with_counts(job, batch)
    assert flags == [module.training for module in model.modules()]
    twin = copy.deepcopy(model)
    eager = Eager(twin, module_runner(twin, "fp32"), OptimizerSpec.from_callable(SGD), micro_batches=MICRO_BATCHES)
    for step in range(2):
        want = eager.step(batch)
        assert float(machine.step(given)["loss"]) == pytest.approx(want, rel=2e-7)  # the mean is in fp32
        if step == 0:
            for name, gradient in eager.gradients.items():
                torch.testing.assert_close(machine.grads[name], gradient, rtol=0, atol=TOLERANCE)
    for name, weight in machine.weights().items():
        torch.testing.assert_close(weight, eager.masters[name].detach(), rtol=0, atol=TOLERANCE)
    statistics = dict(twin.named_buffers())
    moved = [name for name, b in model.named_buffers() if not torch.equal(statistics[name], b)]
    assert bool(moved) == (set_modes is one_layer)
    for name, buffer in machine.buffers().items():
        torch.testing.assert_close(buffer, statistics[name], rtol=0, atol=TOLERANCE)


def test_a_written_folder_keeps_the_modes(tmp_path: Path) -> None:
    """Whatever mode the model is in when the folder is loaded."""
    model, batch = model_and_batch()
    frozen_norms(model)
    with job_of(model, batch, devices=1) as job:
        job.write(tmp_path)
        want = [float(job.step(batch)) for _ in range(2)]
    text = (tmp_path / "device0.py").read_text()
    assert text.count("nn.BatchNorm1d(") == text.count("track_running_stats=True).eval()") == 1
    with penstock.load(tmp_path, model.train()) as job:
        assert [float(job.step(batch)) for _ in range(2)] == want
        assert torch.equal(job.state_dict()["layers.0.norm.running_mean"], model.layers[0].norm.running_mean)


def test_evaluation_is_in_evaluation_mode_as_a_whole() -> None:
    class Plain(Model):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + F.dropout(layer.drop(layer.norm(x)), 0.3, self.training)
            return F.cross_entropy(self.head(x), target)

    torch.manual_seed(0)
    model, (_, batch) = Plain().double(), model_and_batch()
    model.layers[0].norm.eval()
    with job_of(model, batch, devices=1) as job:
        before = job.evaluate(batch).loss
        job.step(batch)
        assert torch.equal(job.state_dict()["layers.0.norm.running_mean"], torch.zeros(6).double())
        assert not torch.equal(job.state_dict()["layers.1.norm.running_mean"], torch.zeros(6).double())
    parts = [{name: value.chunk(2)[m] for name, value in batch.items()} for m in range(2)]
    want = torch.stack([model.eval()(**part).detach() for part in parts]).float().mean()
    torch.testing.assert_close(before, want, check_dtype=False)


@pytest.mark.slow
def test_a_model_in_evaluation_mode_is_warned_of_once_and_others_never() -> None:
    model, batch = model_and_batch()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*evaluation mode")
        job_of(model, batch)
        one_layer(model)
        job_of(model, batch)
    with pytest.warns(UserWarning, match=r"evaluation mode.*dropout.*model\.train\(\)") as said:
        job_of(model.eval(), batch)
    assert len(said) == 1 and said[0].filename == __file__


@pytest.mark.slow
def test_check_compares_in_the_modes_of_the_model() -> None:
    model, batch = model_and_batch()
    frozen_norms(model)  # others have other statistics in the whole batch
    report = check(job_of(model, batch, devices=1), model, [batch, batch])
    assert report.passed and report.skipped is None


@pytest.mark.slow
def test_a_model_of_transformers_trains_in_the_mode_that_it_is_in() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(32, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    job = quiet_job_of(model, batch, devices=1)
    assert "draw_at" not in job.folder.files[0]
    model.transformer.h[0].train()
    text = job_of(model, batch, devices=1).folder.files[0]
    assert (text.count("nn.Dropout(p=0.1, inplace=False).eval()"), text.count("draw_at(self")) == (1, 3)
