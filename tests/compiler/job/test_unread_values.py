"""Texts and numbers of a batch that neither forward nor the loss reads may differ from step to step, as in eager."""

from __future__ import annotations

import copy
import io
import logging
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.ir.errors import BatchError, CaptureError

LOG = logging.getLogger(__name__)
SGD = partial(torch.optim.SGD, lr=0.1)
HARDWARE = penstock.Hardware.cpu(1, memory="64MB")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, **rest: Any) -> Tensor:
        return self.linear(x) * self.scale(rest)

    def scale(self, rest: dict[str, Any]) -> float:
        return 1.0


class Reading(Net):
    """Reads `mode` and `number`, in one dictionary and by one conversion."""

    def scale(self, rest: dict[str, Any]) -> float:
        return float(rest["number"]) * {"half": 0.5, "full": 1.0}[rest["mode"]]


class Asking(Net):
    """Hides from its caller that it reads `mode`, and that the text of another type is none."""

    def scale(self, rest: dict[str, Any]) -> float:
        assert isinstance(rest["mode"], str) and isinstance(rest["step"], int)
        try:
            return 0.5 if rest["mode"].startswith("h") else 1.0
        except AttributeError:
            return 7.0


class Typed(Net):
    """Asks for a type, which nothing that stands for a number can hide."""

    def scale(self, rest: dict[str, Any]) -> float:
        return 0.5 if type(rest["step"]) is int else 1.0


def loss_of(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return (output - batch["y"]).square().mean()


def batch_of(seed: int, **others: Any) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    texts = {"name": f"sample {seed}", "step": seed, "paths": [f"{seed}/{row}" for row in range(4)]}
    tensors = {key: torch.randn(4, 4, generator=made) for key in "xy"}
    return {**tensors, "mode": "half", "number": "2.0", **texts, **others}


@pytest.mark.parametrize("kind", [Net, Reading, Asking])
def test_what_nobody_reads_may_differ_at_every_step(kind: type[Net], tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    twin = copy.deepcopy(model)
    optimizer = SGD(twin.parameters())
    options: dict[str, Any] = {"loss_fn": loss_of, "optimizer": SGD, "micro_batches": 2}
    with penstock.compile(model, HARDWARE, strategy="balanced", example_inputs=batch_of(0), **options) as job:
        again = penstock.load(job.write(tmp_path), copy.deepcopy(model))
        for number in range(3):
            optimizer.zero_grad()
            wanted = loss_of(twin(**batch_of(number)), batch_of(number))
            wanted.backward()
            optimizer.step()
            assert float(job.step(batch_of(number))) == pytest.approx(float(wanted), rel=1e-6)
        if kind is not Net:
            with pytest.raises(BatchError, match="'mode'] is 'full', compiled as 'half'"):
                job.step(batch_of(3, mode="full"))
        else:
            job.step(batch_of(3, mode="full"))
        if kind is Reading:
            with pytest.raises(BatchError, match=r"'number'\] is '4\.0', compiled as '2\.0'"):
                job.step(batch_of(3, number="4.0"))
        with pytest.raises(BatchError, match="'name'] is absent"):
            job.step({key: value for key, value in batch_of(4).items() if key != "name"})
        job.step(batch_of(4))
        with again:
            assert float(again.step(batch_of(5))) > 0


def loss_by_text(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return loss_of(output, batch) * (2.0 if "s" in batch["name"] else 1.0)


def loss_by_match(output: Tensor, batch: dict[str, Any]) -> Tensor:
    return loss_of(output, batch) * len(re.findall("s", batch["name"]))  # C code, which takes texts only


@pytest.mark.parametrize("loss_fn", [loss_by_text, loss_by_match])
def test_a_text_that_the_loss_reads_stays_as_compiled(loss_fn: Any) -> None:
    options: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": SGD, "micro_batches": 1}
    with penstock.compile(Net(), HARDWARE, strategy="balanced", example_inputs=batch_of(0), **options) as job:
        job.step(batch_of(0))
        with pytest.raises(BatchError, match="'name'] is 'sample 1', compiled as 'sample 0'"):
            job.step(batch_of(1))
        job.step({**batch_of(0), **{key: batch_of(1)[key] for key in "xy"}})


def test_a_type_that_forward_asks_for_is_that_of_the_value() -> None:
    """Also where nothing is compared with eager, as a trace alone must see it."""
    model = Typed()
    wanted = loss_of(model(**batch_of(0)), batch_of(0))
    options: dict[str, Any] = {"loss_fn": loss_of, "optimizer": SGD, "micro_batches": 1, "check": False}
    with penstock.compile(model, HARDWARE, strategy="balanced", example_inputs=batch_of(0), **options) as job:
        assert float(job.step(batch_of(0))) == pytest.approx(wanted.item(), rel=1e-6)


class Logging(Net):
    """Writes values into a log, and once wrongly."""

    def scale(self, rest: dict[str, Any]) -> float:
        LOG.warning("%s: step %03d", rest["name"], rest["step"])
        LOG.warning("%d", "no number")
        return 1.0


def test_a_log_of_values_tells_no_errors_but_those_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(io.StringIO())
    LOG.addHandler(handler)
    LOG.propagate = False
    try:
        model, batch = Logging(), batch_of(0)
        wanted = loss_of(model(**batch), batch)
        capsys.readouterr()
        options: dict[str, Any] = {"loss_fn": loss_of, "optimizer": SGD, "strategy": "balanced"}
        with penstock.compile(model, HARDWARE, example_inputs=batch, **options) as job:
            torch.testing.assert_close(job.step(batch), wanted.detach())
        told = capsys.readouterr().err
    finally:
        LOG.removeHandler(handler)
    assert "Logging error" in told and "no number" in told and "ValueRead" not in told
    assert "sample 0: step 000" in handler.stream.getvalue()


def test_a_list_that_is_compared_with_rows_takes_one_micro_batch() -> None:
    def loss_fn(output: Tensor, batch: dict[str, Any]) -> Tensor:
        assert len(batch["paths"]) == len(output)
        return loss_of(output, batch)

    options: dict[str, Any] = {"example_inputs": batch_of(0), "loss_fn": loss_fn, "optimizer": SGD}
    said = r"2 rows, and all 4 entries of batch\['paths'\], which is no tensor: micro_batches=1 gives"
    with pytest.raises(CaptureError, match=said):
        penstock.compile(Net(), HARDWARE, micro_batches=2, **options)
    model = Net()
    wanted = loss_fn(model(**batch_of(0)), batch_of(0)).detach()
    with penstock.compile(model, HARDWARE, micro_batches=1, **options) as job:
        torch.testing.assert_close(job.step(batch_of(0)), wanted)
