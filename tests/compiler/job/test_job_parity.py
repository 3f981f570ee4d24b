"""Training through the public API equals eager PyTorch: losses, every gradient, updated weights and buffers."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.compiler.strategies import STRATEGIES
from penstock.tests.compiler.eager_baseline import MICRO_BATCHES, SGD, Eager, assert_close, assert_same_states, zoo_case
from penstock.tests.shown_elsewhere import slow_but

# Stages in a chain add up in eager's order: bit for bit. Where a tensor or a tied weight feeds several stages, its
# gradient is a sum of the same few terms in another order: each addition rounds by at most 2^-24 of the running sum,
# and three steps carry that through the network (7.5e-7 of the largest entry was measured).
CHAIN, REORDERED = 0.0, 5e-6

RESIDENT, SWAPPED = "64MB", "250kB"
CASES = {
    "gpt2": REORDERED,  # one table for the first and the last stage
    "t5": REORDERED,  # the encoder's output feeds every decoder block
    "bert": CHAIN,
    "wide_resnet": CHAIN,
    "custom_function": CHAIN,
}


def compile_job(name: str, num_devices: int, memory: str, **options: Any) -> tuple[Job, nn.Module, dict[str, Tensor]]:
    model, batch = zoo_case(name)
    job = penstock.compile(
        model,
        penstock.Hardware.cpu(num_devices=num_devices, memory=memory, dram="1GB"),
        example_inputs=batch,
        **{"optimizer": SGD, "micro_batches": MICRO_BATCHES, "strategy": "balanced", **options},
    )
    return job, model, batch


def assert_trains_like(job: Job, eager: Eager, batch: Any, tolerance: float, steps: int = 3) -> None:
    """Losses, gradients (as momentum), weights and buffers after several steps."""
    for _ in range(steps):
        assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, tolerance and 1e-6)
    assert_same_states(job, eager, tolerance)
    assert_close(job.state_dict(), eager.model.state_dict(), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [RESIDENT, SWAPPED])
@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        pytest.param("t5", marks=pytest.mark.slow),
        pytest.param("bert", marks=pytest.mark.slow),
        pytest.param("wide_resnet", marks=pytest.mark.slow),
    ],
)
def test_one_device(name: str, memory: str) -> None:
    job, model, batch = compile_job(name, 1, memory)
    assert bool(job.plan.decisions.fetch) == (memory == SWAPPED)
    eager = Eager(model)
    with job:
        assert_trains_like(job, eager, batch, CASES[name])


@pytest.mark.multi
@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("gpt2", SWAPPED),
        pytest.param("wide_resnet", RESIDENT, marks=pytest.mark.slow),
        pytest.param("gpt2", RESIDENT, marks=pytest.mark.slow),
        pytest.param("t5", RESIDENT, marks=pytest.mark.slow),
        pytest.param("t5", SWAPPED, marks=pytest.mark.slow),
        pytest.param("bert", RESIDENT, marks=pytest.mark.slow),
        pytest.param("bert", "200kB", marks=pytest.mark.slow),
        pytest.param("wide_resnet", SWAPPED, marks=pytest.mark.slow),
    ],
)
def test_two_devices(name: str, memory: str) -> None:
    job, model, batch = compile_job(name, 2, memory)
    assert bool(job.plan.decisions.fetch) == (memory != RESIDENT)
    eager = Eager(model)
    with job:
        assert_trains_like(job, eager, batch, CASES[name])
        assert_close({"loss": job.evaluate(batch).loss}, {"loss": eager.evaluate(batch)}, 1e-6)
        job.step(batch)  # evaluation has left the memory as it was


@pytest.mark.slow
@pytest.mark.multi
def test_mobius_with_checkpoints_in_dram_updates_under_the_backward() -> None:
    """Two processes; inputs of stages wait in DRAM, and stages are updated before the norm of gradients is known."""
    line = STRATEGIES["mobius-dram"].replace("partition-mip", "partition-balanced{stages=4}")
    line = line.replace("tier=none", "tier=none, swap=true").replace("insert-fetch", "insert-fetch{swap=true}")
    line = line.replace("overlap-optimizer", "overlap-optimizer{clip=speculative}")
    job, model, batch = compile_job("gpt2", 2, RESIDENT, strategy=line, max_grad_norm=0.5)
    decisions = job.plan.decisions
    assert len(decisions.fetch) == 4
    assert list(decisions.activations) == ["stage1", "stage2", "stage3"]  # the first one's input is the batch
    assert all((row.inputs_to, row.classes) == ("dram", []) for row in decisions.activations.values())
    assert all("rt.redo(" in job.code(device) for device in range(2))
    with job:
        assert_trains_like(job, Eager(model, max_grad_norm=0.5), batch, REORDERED)


@pytest.mark.slow
@pytest.mark.multi
def test_custom_autograd_function_of_a_test_module_in_workers() -> None:
    """The workers import the function's module, and run its own backward; never this script."""
    job, model, batch = compile_job("custom_function", 2, "1MB")
    assert "ScaledGradient" in job.code(0) + job.code(1)
    with job:
        assert_trains_like(job, Eager(model), batch, CHAIN)


@pytest.mark.parametrize(("name", "tight"), [("mlp", "4kB"), pytest.param("gpt2", SWAPPED, marks=pytest.mark.slow)])
def test_dropout_repeats_eager_with_the_same_seeds_and_does_not_care_for_tiers(name: str, tight: str) -> None:
    """A resident stage draws as eager does; the same stages swapped and rematerialised draw the same again."""
    model, batch = zoo_case(name, dropout=0.2)
    eager = Eager(model, seed=3)
    single, parted = "partition-balanced{stages=1}", "partition-balanced{stages=4}"
    states = {}
    for text, memory in ((single, RESIDENT), (parted, RESIDENT), (parted, tight)):
        job = penstock.compile(
            copy.deepcopy(model),
            penstock.Hardware.cpu(num_devices=1, memory=memory, dram="1GB"),
            example_inputs=batch,
            optimizer=SGD,
            micro_batches=MICRO_BATCHES,
            strategy=STRATEGIES["balanced"].replace("partition-balanced", text),
            seed=3,
        )
        with job:
            if text == single:
                assert_trains_like(job, eager, batch, CHAIN)
            else:
                for _ in range(2):
                    job.step(batch)
                states[memory] = job.state_dict()
                assert bool(job.plan.decisions.rematerialise) == (memory != RESIDENT)
    assert_close(states[tight], states[RESIDENT], 0.0)


class Regressor(nn.Sequential):
    """An nn.Sequential whose loss is the user's own function of its output and the batch."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def squared_error(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(output, batch[1])


def named_error(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["target"])


@pytest.mark.parametrize("form", slow_but(("dict",), ["tuple", "dict"]))
def test_sequential_with_a_loss_function(form: str) -> None:
    """Of the batch, forward gets what it takes; the rest is for the loss."""
    torch.manual_seed(0)
    model, x, y = Regressor(), torch.randn(8, 6), torch.randn(8, 2)
    batch: Any = (x, y) if form == "tuple" else {"input": x, "target": y}
    loss_fn: Any = squared_error if form == "tuple" else named_error
    eager = Eager(model, loss_of=lambda m, b: loss_fn(m(b[0] if form == "tuple" else b["input"]), b))
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1MB")
    with penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, loss_fn=loss_fn, micro_batches=MICRO_BATCHES,
        strategy="balanced",
    ) as job:  # fmt: skip
        assert_trains_like(job, eager, batch, CHAIN)
        out = job.evaluate(batch)
        assert out.output.shape == (8, 2)
        assert_close({"loss": out.loss}, {"loss": eager.evaluate(batch)}, 0.0)


class PartlyUsed(nn.Module):
    """A frozen layer, a frozen bias, a layer that no loss reaches, and a table with one parameter used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1)
        self.unused = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.frozen(x)))
        h = torch.tanh(self.first(h))
        return F.mse_loss(self.second(h), y)


@pytest.mark.parametrize("stages", slow_but([3], [1, 3]))
def test_frozen_shared_and_unused_parameters(stages: int) -> None:
    torch.manual_seed(0)
    model, batch = PartlyUsed(), {"x": torch.randn(8, 6), "y": torch.randn(8, 1)}
    eager = Eager(model, partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1))
    job = penstock.compile(
        model,
        penstock.Hardware.cpu(num_devices=1, memory="1MB"),
        example_inputs=batch,
        optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        micro_batches=MICRO_BATCHES,
        strategy=STRATEGIES["balanced"].replace("partition-balanced", f"partition-balanced{{stages={stages}}}"),
    )
    before = copy.deepcopy(model.state_dict())
    with job:
        for _ in range(3):
            job.step(batch)
            eager.step(batch)
        after = job.state_dict()
        assert_close(after, eager.model.state_dict(), CHAIN if stages == 1 else REORDERED)
    for name in ("frozen.weight", "frozen.bias", "first.bias", "unused.weight", "unused.bias"):
        assert torch.equal(after[name], before[name])  # as eager: no gradient, so no weight decay either
    assert not torch.equal(after["first.weight"], before["first.weight"])


@pytest.mark.slow
def test_clipping_follows_clip_grad_norm() -> None:
    """The norm is over all stages; the factor is max_norm / norm, where torch adds 1e-6 to the norm."""
    model, batch = zoo_case("bert")
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.5), "max_grad_norm": 0.05}
    eager = Eager(model, options["optimizer"], max_grad_norm=0.05)
    job = penstock.compile(
        model,
        penstock.Hardware.cpu(num_devices=1, memory=SWAPPED),
        example_inputs=batch,
        micro_batches=MICRO_BATCHES,
        **options,
    )
    with job:
        for _ in range(3):
            job.step(batch)
            eager.step(batch)
            assert eager.gradient_norm > 0.05, "nothing is clipped"
            assert job.last is not None and job.last.gradient_norm == pytest.approx(eager.gradient_norm, rel=1e-4)
        assert_close(job.state_dict(), eager.model.state_dict(), 1e-4)


@pytest.mark.slow
def test_learning_rate_schedule_follows_torch() -> None:
    model, batch = zoo_case("mlp")
    options: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=1e-2),
        "lr_scheduler": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=5e-2, total_steps=6),
    }
    eager = Eager(model, **options)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1MB")
    options |= {"micro_batches": MICRO_BATCHES, "strategy": "balanced"}
    with penstock.compile(model, hardware, example_inputs=batch, **options) as job:
        for _ in range(5):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 1e-6)
        assert_close(job.state_dict(), eager.model.state_dict(), CHAIN)


def test_bf16_follows_autocast() -> None:
    """Weights are fp32 masters, the computation is that of torch.autocast on them cast once."""
    model, batch = zoo_case("mlp")
    hardware = penstock.Hardware.cpu(num_devices=1, memory="1MB")
    eager = Eager(model, loss_of=autocast_loss)
    with penstock.compile(
        model, hardware, example_inputs=batch, optimizer=SGD, micro_batches=MICRO_BATCHES, precision="bf16",
        strategy="balanced",
    ) as job:  # fmt: skip
        for _ in range(3):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, 2e-2)
        assert all(t.dtype == torch.float32 for t in job.state_dict().values())
        assert_close(job.state_dict(), eager.model.state_dict(), 2e-2)


def autocast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(**batch)["loss"]
