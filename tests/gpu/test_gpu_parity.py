"""Training on one GPU equals eager PyTorch on it: every kind of plan, precision and state."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import penstock
from penstock.bench.peers import parity
from penstock.tests.gpu.rehearsal import (
    DEVICE,
    DROPPING,
    KINDS,
    SIZE,
    batches,
    compile_job,
    exact,
    model_of,
    on_gpu,
    session_of,
)
from penstock.tests.shown_elsewhere import core_of
from penstock.tests.zoo import wide_resnet, zoo

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu

WITH_MASKS = ("gpt2", "bert", "llama", "t5")  # of transformers


CORE = {("resident", "fp32"), ("2 stages", "fp16"), ("swapped", "bf16")}


@pytest.mark.parametrize(("kind", "precision"), core_of(CORE, product(KINDS, ("fp32", "bf16", "fp16"))))
def test_losses_and_weights_are_eagers(kind: str, precision: str) -> None:
    """Tied weights too: they are in the first and in the last stage."""
    model, data = model_of(), batches()
    wanted = parity.train_eager(model, data, DEVICE, precision)
    with KINDS[kind](model, data[0], precision=precision) as job:
        assert bool(job.plan.decisions.fetch) == (kind == "swapped")
        found = parity.train_job(job, data)
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.fits(precision), apart
    assert found.losses[-1] < found.losses[0]


@pytest.mark.parametrize("kind", ["resident", "swapped"])
def test_clipping(kind: str) -> None:
    model, data = model_of(), batches()
    wanted = parity.train_eager(model, data, DEVICE, max_grad_norm=0.5)
    with KINDS[kind](model, data[0], max_grad_norm=0.5) as job:
        found = parity.train_job(job, data)
        assert job.last.gradient_norm is not None and job.last.gradient_norm > 0.5
    assert parity.compare(found, wanted, parity.start_of(model)).fits("fp32")


def test_adamw() -> None:
    """Fused on the device. Rounding noise in gradients near zero becomes whole steps: the bound is wider."""
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    model, data = model_of(), batches()
    wanted = parity.train_eager(model, data, DEVICE, optimizer=optimizer)
    with compile_job(model, data[0], optimizer=optimizer) as job:
        found = parity.train_job(job, data)
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.loss <= 1e-5 and apart.weights <= 2e-2, apart


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_dropout_draws_what_eager_draws(precision: str) -> None:
    model, data = model_of(DROPPING), batches(DROPPING)
    wanted = parity.train_eager(model, data, DEVICE, precision)
    without = parity.train_eager(model_of(SIZE), data, DEVICE, precision)
    with compile_job(model, data[0], precision=precision) as job:
        found = parity.train_job(job, data)
    assert parity.compare(found, wanted, parity.start_of(model)).fits(precision)
    assert found.losses != without.losses


def test_rematerialisation_and_swapping_draw_the_same_dropout_again() -> None:
    """Three plans of the same stages: saved tensors kept, all rematerialised, and weights fetched besides."""
    model, data = model_of(DROPPING), batches(DROPPING)
    kept = compile_job(model, data[0], stages=3)
    stages = [f"stage{i}" for i in range(3)]
    assert not kept.plan.decisions.rematerialise
    again = change(kept.plan, rematerialise=stages)
    in_dram = {"fetch": {stage: {} for stage in stages}, "optimizer": dict.fromkeys(stages, "dram")}
    moved = change(kept.plan, rematerialise=stages, **in_dram)
    found = []
    for plan in (kept.plan, again, moved):
        with compile_job(model, data[0], stages=0, plan=plan) as job:
            found.append(parity.train_job(job, data))
    assert bool(moved.decisions.fetch) and again.decisions.rematerialise == stages
    assert found[0].losses == found[1].losses
    for other in found[1:]:
        assert parity.compare(other, found[0], parity.start_of(model)).fits("fp32")


def change(plan: penstock.Plan, **decisions: Any) -> penstock.Plan:
    return plan.model_copy(update={"decisions": plan.decisions.model_copy(update=decisions)})


@pytest.mark.parametrize("again", [False, True], ids=["kept", "rematerialised"])
def test_batch_norm_sees_every_micro_batch_once(again: bool) -> None:
    model, _ = wide_resnet(dropout=0.0)
    made = torch.Generator().manual_seed(0)
    data = [
        {"x": torch.randn(8, 3, 8, 8, generator=made), "labels": torch.randint(0, 4, (8,), generator=made)}
        for _ in range(parity.STEPS)
    ]
    wanted = parity.train_eager(model, data, DEVICE)
    job = compile_job(model, data[0])
    if again:
        job = compile_job(model, data[0], stages=0, plan=change(job.plan, rematerialise=["stage0"]))
    with job:
        found = parity.train_job(job, data)
    assert parity.compare(found, wanted, parity.start_of(model)).fits("fp32")
    assert set(found.buffers) == set(wanted.buffers) and found.buffers
    for name, value in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["resident", "swapped"])
def test_a_loss_scale_that_overflows_skips_the_step(kind: str) -> None:
    model, data = model_of(), batches()
    with KINDS[kind](model, data[0], precision="fp16", max_grad_norm=1.0) as job:
        job.step(data[0])
        assert not job.last.skipped
        before = {name: value.detach().cpu().clone() for name, value in job.state_dict().items()}
        session_of(job).state.loss_scale.scale = 2.0**40
        job.step(data[1])
        assert job.last.skipped and session_of(job).state.loss_scale.scale == 2.0**39
        assert all(torch.equal(value.cpu(), before[name]) for name, value in job.state_dict().items())
        session_of(job).state.loss_scale.scale = 2.0**10
        job.step(data[2])
        assert not job.last.skipped
        assert not torch.equal(job.state_dict()["head.weight"].cpu(), before["head.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation(kind: str) -> None:
    model, (batch, *_) = model_of(DROPPING), batches(DROPPING)
    with KINDS[kind](model, batch) as job:
        found = job.evaluate(batch)
    twin = model_of(DROPPING).to(DEVICE).eval()
    with torch.no_grad():
        wanted = twin(**{name: value.to(DEVICE) for name, value in batch.items()})
    torch.testing.assert_close(found.logits.cpu(), wanted["logits"].cpu(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.loss.cpu(), wanted["loss"].cpu(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    model, data = model_of(), batches(count=4)
    with KINDS[kind](model, data[0], optimizer=optimizer) as job:
        for batch in data[:2]:
            job.step(batch)
        job.save(tmp_path / "checkpoint", data={"position": 2})
        wanted = [float(job.step(batch)) for batch in data[2:]]
        weights = {name: value.detach().cpu().clone() for name, value in job.state_dict().items()}
    with KINDS[kind](model, data[0], optimizer=optimizer) as job:
        assert job.resume(tmp_path / "checkpoint") == {"position": 2}
        assert [float(job.step(batch)) for batch in data[2:]] == wanted
        assert all(torch.equal(value.cpu(), weights[name]) for name, value in job.state_dict().items())


def test_the_users_own_model_gets_the_weights() -> None:
    model, data = model_of(), batches()
    with compile_job(model, data[0], stages=2) as job:
        job.step(data[0])
        job.sync()
        trained = job.state_dict()
        assert all(torch.equal(value.cpu(), trained[name].cpu()) for name, value in model.state_dict().items())
    assert next(model.parameters()).device.type == "cpu"


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5", "custom_function", "lstm"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_models(name: str, precision: str) -> None:
    if name in WITH_MASKS:
        pytest.importorskip("transformers")
    make = zoo()[name]
    model, _ = make(dropout=0.0)
    data = [join_batches([make(seed=seed)[1], make(seed=seed + 1)[1]]) for seed in range(parity.STEPS)]
    wanted = parity.train_eager(model, data, DEVICE, precision)
    with compile_job(model, data[0], precision=precision) as job:
        found = parity.train_job(job, data)
    apart = parity.compare(found, wanted, parity.start_of(model))
    loss, weights = parity.LIMITS[precision]
    more = 10 if name in WITH_MASKS else 1  # an explicit mask takes another kernel
    assert apart.loss <= more * loss and apart.weights <= more * weights, apart


def join_batches(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
