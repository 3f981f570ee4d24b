"""The parity harness agrees with eager where the plan does, and tells where it does not."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.compiler.check.check import CheckReport, check
from penstock.compiler.job.job import Job
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo

HARDWARE = penstock.Hardware.cpu(num_devices=1, memory="64MB", dram="1GB")


def job_for(model: nn.Module, batch: Any, **options: Any) -> Job:
    """A job in this process."""
    options = {"optimizer": partial(torch.optim.AdamW, lr=1e-3), "strategy": "balanced", **options}
    return penstock.compile(model, HARDWARE, example_inputs=batch, micro_batches=2, **options)


def check_model(name: str, dropout: float, **options: Any) -> CheckReport:
    model, batch = zoo()[name](dropout=dropout)
    return check(job_for(model, batch, **options), model, [batch, batch])


@pytest.mark.slow
def test_a_model_without_randomness_is_compared_with_itself_too() -> None:
    report = check_model("gpt2", dropout=0.0, max_grad_norm=0.5)
    assert report.passed and report.skipped is None
    assert [(d.what, d.against) for d in report.differences] == [
        (what, against) for against in ("captured graph", "model itself") for what in ("loss", "gradient", "weight")
    ]
    assert len(report.losses) == 2 and report.losses[1] < report.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "custom_function"])
def test_dropout_agrees_because_a_draw_is_seeded_by_its_place_also_in_the_model_itself(name: str) -> None:
    report = check_model(name, dropout=0.1)
    assert report.passed and report.skipped is None
    assert {d.against for d in report.differences} == {"captured graph", "model itself"}
    for difference in report.differences:  # the model itself takes the whole batch at once
        size = difference.largest if difference.against == "captured graph" else difference.relative
        assert size < 1e-6, difference


@pytest.mark.slow
def test_what_is_not_drawn_by_rows_is_compared_with_the_captured_graph_alone() -> None:
    """The whole batch is given to the model at once, and a recurrent layer's states do not begin with its rows."""
    report = check_model("lstm", dropout=0.1)
    assert report.passed and report.skipped is not None
    assert "not of single rows" in report.skipped and "micro_batches=1" in report.skipped


@pytest.mark.slow
def test_activation_checkpointing_in_the_model_draws_no_other_numbers() -> None:
    model, batch = zoo()["gpt2"](dropout=0.1)
    model.gradient_checkpointing_enable()
    report = check(job_for(model, batch), model, [batch])
    assert report.passed and max(d.largest for d in report.differences) < 1e-6


@pytest.mark.slow
def test_an_optimizer_without_states_is_probed_all_the_same() -> None:
    assert check_model("mlp", dropout=0.0, optimizer=partial(torch.optim.SGD, lr=0.1)).passed


@pytest.mark.slow
@pytest.mark.parametrize("precision", slow_but(("fp16",), ["bf16", "fp16"]))
def test_low_precision(precision: str) -> None:
    report = check_model("mlp", dropout=0.0, precision=precision, max_grad_norm=1.0)
    assert report.passed
    assert next(d for d in report.differences if d.what == "gradient").relative < 1e-3


def test_other_random_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.compiler.check.eager.micro_batch_seed", lambda *where: 7)
    assert not check_model("mlp", dropout=0.5).passed


def test_another_gradient_is_found_and_named() -> None:
    model, batch = zoo()["mlp"](dropout=0.0)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("body.4.weight")[0, 0] += 0.01
    report = check(job_for(model, batch), other, [batch])
    assert not report.passed
    weight = next(d for d in report.differences if d.what == "weight")
    assert weight.where == "body.4.weight" and weight.largest == pytest.approx(0.01, rel=0.2)
    assert not next(d for d in report.differences if d.what == "gradient").passed


def test_the_users_model_is_left_alone() -> None:
    model, batch = zoo()["mlp"](dropout=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check(job_for(model, batch), model, [batch])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
