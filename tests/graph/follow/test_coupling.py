"""Losses that couple rows, and losses that are sums over rows, trained as eager trains the whole batch."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.check.check import check
from penstock.compiler.job.job import Job
from penstock.compiler.strategies import STRATEGIES
from penstock.graph.follow.coupling import fact_lines
from penstock.graph.follow.rows import MEAN_OVER_ROWS
from penstock.ir.errors import DoesNotFit
from penstock.tests.compiler.eager_baseline import optimizer_states
from penstock.tests.compiler.reasons import reasons_of
from penstock.tests.graph.follow.losses import COUPLED, MEANS, SUMS, batch_of, loss_of, model_of

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)  # its momentum after the first step is the gradient
ROWS = 8


def compile_job(model: nn.Module, batch: dict[str, Any], num_devices: int = 2, **options: Any) -> Job:
    hardware = options.pop("hardware", None) or penstock.Hardware.cpu(num_devices=num_devices, memory="64MB")
    return penstock.compile(model, hardware, example_inputs=batch, optimizer=SGD, search_s=0.1, **options)


def facts_said(job: Job) -> str:
    """The lines of `explain` on rows."""
    interface = job.folder.interface
    return " ".join(fact_lines(job.folder.settings.rows, interface.micro_batches_of_update, interface.asynchronous))


def eager(model: nn.Module, batch: dict[str, Any], steps: int = 2) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """Losses, gradients of the first step, and the trained copy, of the whole batch at once."""
    model = copy.deepcopy(model).train()
    optimizer, losses, gradients = SGD(model.parameters()), [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = gradients or {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, gradients, model


def assert_trains_alike(job: Job, model: nn.Module, batch: dict[str, Any]) -> None:
    """Loss, gradients and weights agree with eager's on the whole batch, up to rounding in fp32."""
    losses, gradients, trained = eager(model, batch)
    with job:
        first = float(job.step(batch))
        momenta = {name: state["momentum_buffer"].clone() for (_, name), state in optimizer_states(job).items()}
        assert [first, float(job.step(batch))] == pytest.approx(losses, rel=1e-5)
        weights = job.state_dict()
    for name, gradient in gradients.items():
        torch.testing.assert_close(momenta[name], gradient, rtol=1e-4, atol=1e-6)
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def clip() -> tuple[nn.Module, dict[str, Any]]:
    """A tiny CLIP: every text meets every image of the batch."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**sizes, **tokens, "vocab_size": 96, "max_position_embeddings": 16},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).train()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 96, (ROWS, 6), generator=generator)
    ids[:, -1] = 2
    pixels = torch.randn(ROWS, 3, 8, 8, generator=generator)
    return model, {"input_ids": ids, "pixel_values": pixels, "return_loss": True}


@pytest.mark.slow
def test_a_contrastive_model_trains_on_the_whole_batch() -> None:
    model, batch = clip()
    job = compile_job(model, batch)
    assert job.plan.micro_batches == 1
    text = facts_said(job)
    assert "rows of a batch are coupled; there is one micro-batch, so the loss is that of the whole batch" in text
    assert "matmul takes rows together with all other rows at modeling_clip.py:" in text
    assert_trains_alike(job, model, batch)


def test_an_explicit_number_of_micro_batches_is_honoured_and_said(tmp_path: Path) -> None:
    model, batch = model_of(COUPLED["in-batch negatives"]), batch_of(ROWS)
    with pytest.warns(UserWarning, match="each of 4 micro-batches has only its own: the loss is not that of the whole"):
        job = compile_job(model, batch, num_devices=1, micro_batches=4, strategy="mobius")
    with job:
        assert job.plan.micro_batches == 4
        parts = [{name: value.chunk(4)[i] for name, value in batch.items()} for i in range(4)]
        losses = [float(loss_of(model, part).detach()) for part in parts]
        assert float(job.step(batch)) == pytest.approx(sum(losses) / 4, rel=1e-5)
        job.write(tmp_path)
    with penstock.load(tmp_path, model) as loaded:
        assert "each of 4 micro-batches has only its own" in " ".join(reasons_of(loaded).split())
        assert loaded.plan.hash == job.plan.hash


def test_batch_norm_is_named_as_what_it_is() -> None:
    model, batch = model_of(COUPLED["batch norm"]), batch_of(ROWS)
    job = compile_job(model, batch, num_devices=1, strategy="mobius")
    assert job.plan.micro_batches == 1
    assert "BatchNorm: norm (BatchNorm1d): its statistics, also those it keeps for evaluation" in facts_said(job)
    assert_trains_alike(job, model, batch)


def test_one_micro_batch_that_cannot_fit_says_why() -> None:
    batch = batch_of(4096)
    hardware = penstock.Hardware.cpu(num_devices=1, memory="300kB")
    model = model_of(COUPLED["variance"])
    with pytest.raises(DoesNotFit) as caught:
        compile_job(model, batch, hardware=hardware, strategy="mobius")
    assert "Rows of a batch are coupled: var runs across the rows at losses.py:" in str(caught.value)
    assert "an explicit micro_batches=... is possible and would train with another loss" in str(caught.value)
    job = compile_job(model, batch, hardware=hardware, strategy="mobius", **caught.value.nearest)
    assert job.plan.micro_batches > 1
    assert compile_job(model_of(MEANS["mean"]), batch, hardware=hardware).plan.micro_batches > 1


def test_a_strategy_of_several_lanes_is_honoured_and_said() -> None:
    model, batch = model_of(COUPLED["dino"]), batch_of(ROWS)
    job = compile_job(model, batch, num_devices=2, strategy="mics")
    assert job.plan.micro_batches == 2  # one for each lane, the fewest
    assert "each of 2 micro-batches has only its own" in facts_said(job)


@pytest.mark.parametrize(
    ("name", "count", "num_devices", "strategy"),
    [("sum", 2, 1, "mobius"),
     pytest.param("sum", 1, 1, "mobius", marks=pytest.mark.slow),
     pytest.param("sum", 4, 2, "mobius", marks=pytest.mark.slow),
     pytest.param("sum", 4, 2, "mics", marks=pytest.mark.slow),
     pytest.param("sum by a constant", 4, 1, "mobius", marks=pytest.mark.slow),
     ("sum of squares", 2, 1, "mobius"),
     ("sum over rows by number", 4, 1, "mobius")],
)  # fmt: skip
def test_a_sum_over_rows_is_that_of_the_whole_batch(name: str, count: int, num_devices: int, strategy: str) -> None:
    model, batch = model_of({**MEANS, **SUMS}[name]), batch_of(ROWS)
    job = compile_job(model, batch, num_devices, micro_batches=count, strategy=strategy)
    is_multiplied = name in SUMS and count > 1
    assert (f"* {float(count)}" in job.code(0)) == is_multiplied
    assert ("multiplied by M" in facts_said(job)) == (name in SUMS)
    assert_trains_alike(job, model, batch)


def test_evaluation_of_a_sum_is_that_of_the_whole_batch() -> None:
    model, batch = model_of(SUMS["sum"]), batch_of(ROWS)
    with compile_job(model, batch, num_devices=1, micro_batches=4, strategy="mobius") as job:
        found = job.evaluate(batch)
    assert float(found["loss"]) == pytest.approx(float(loss_of(model, batch).detach()), rel=1e-5)


def test_a_sum_is_checked_against_the_model_itself() -> None:
    model, batch = model_of(SUMS["sum"]), batch_of(ROWS)
    assert check(compile_job(model, batch, num_devices=1, micro_batches=4, strategy="mobius"), model, [batch]).passed


def test_in_asynchronous_training_each_micro_batch_is_a_batch() -> None:
    model, batch = model_of(SUMS["sum"]), batch_of(ROWS)
    job = compile_job(model, batch, num_devices=1, micro_batches=4, strategy="async")
    assert job.plan.decisions.staleness
    assert job.folder.settings.rows == MEAN_OVER_ROWS
    assert "* 4.0" not in job.code(0)
    of_two = compile_job(
        model, batch, num_devices=1, micro_batches=4, strategy=STRATEGIES["async"] + "{accumulate=2}"
    )  # fmt: skip
    assert "* 2" in of_two.code(0)  # their mean is the sum over both
