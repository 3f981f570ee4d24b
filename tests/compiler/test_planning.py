"""The caller's state of torch changes nothing of a job, and a job changes nothing of that state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.job.job import Job
from penstock.ir.errors import PlanError


class Small(nn.Module):
    """Makes a tensor of the default type on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + torch.ones(4)).square().mean()


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


State = Callable[[], AbstractContextManager[Any]]
STATES: dict[str, State] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "without gradients": torch.no_grad,
    "another device": lambda: torch.device("meta"),
}


def job_of(model: nn.Module) -> Job:
    hardware = penstock.Hardware.cpu(1, memory="64MB")
    return penstock.compile(
        model, hardware, example_inputs={"x": {"shape": [4, 4], "dtype": "float32"}}, strategy="balanced",
        micro_batches=2, optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip


def state_of_torch() -> tuple[Any, ...]:
    made = torch.empty(0)
    return made.dtype, made.device, torch.is_grad_enabled(), torch.is_inference(made), torch.is_autocast_enabled("cpu")


def losses_of(compiling: State = torch.enable_grad, stepping: State = torch.enable_grad) -> list[float]:
    """The losses of two steps of a job that was compiled in one state and is called in another."""
    torch.manual_seed(0)
    model, x, found = Small(), torch.randn(4, 4), []
    with compiling():
        entered = state_of_torch()
        job = job_of(model)
        assert state_of_torch() == entered
    with job:
        for _ in range(2):
            with stepping():
                entered = state_of_torch()
                found.append(float(job.step({"x": x})))
                assert state_of_torch() == entered
    return found


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return losses_of()


@pytest.mark.parametrize("state", [*STATES.values(), double_by_default], ids=[*STATES, "double"])
def test_steps_are_those_of_torchs_own_state(state: State, losses: list[float]) -> None:
    assert losses_of(stepping=state) == losses


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_compile_in_any_state(state: State, losses: list[float]) -> None:
    assert losses_of(compiling=state) == losses


def test_another_default_type_is_refused_before_planning() -> None:
    with double_by_default(), pytest.raises(PlanError, match=r"is torch\.float64, in which this script makes"):
        job_of(Small())
