"""States in lists, tuples and dicts are counted, moved and saved by their tensors; what hides tensors is refused."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PlanError
from penstock.runtime.optimizer.leaves import leaves_of, rebuilt
from penstock.runtime.optimizer.spec import OptimizerSpec
from penstock.tests.runtime.optimizer.matrix_optimizers import Hides, Mixes, Shampoo, Soap


def mean(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def case() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 100), nn.Tanh(), nn.Linear(100, 4)), torch.randn(8, 8)


def job_of(model: nn.Module, x: Tensor, optimizer: Any, **options: Any) -> penstock.Job:
    hardware = penstock.Hardware.cpu(num_devices=options.pop("devices", 1))
    return penstock.compile(
        model, hardware, example_inputs=x, loss_fn=mean, optimizer=optimizer, micro_batches=1, **options
    )


def test_containers_are_taken_apart_and_put_together() -> None:
    value = {"a": [torch.ones(2), []], "b": (torch.zeros(3),)}
    leaves = leaves_of("state", value)
    assert {name: tuple(t.shape) for name, t in leaves.items()} == {"state.a.0": (2,), "state.b.0": (3,)}
    again = rebuilt("state", value, {name: t + 1 for name, t in leaves.items()})
    assert again["a"][0].tolist() == [2, 2] and again["a"][1] == [] and isinstance(again["b"], tuple)


def test_matrices_in_lists_are_counted() -> None:
    shapes = OptimizerSpec.from_callable(Soap).state_shapes((8, 100))
    sizes = {"moment": (8, 100), "GG.0": (8, 8), "Q.0": (8, 8)}  # the dimension of 100 has none
    assert {name: shape for name, (shape, _) in shapes.items()} == sizes
    wanted = 4 * sum(math.prod(shape) for shape in sizes.values())
    assert OptimizerSpec.from_callable(Soap).state_bytes([(8, 100)]) == wanted


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "mobius-ssd"}, pytest.param({"devices": 2}, marks=pytest.mark.slow)]
)
def test_steps_saves_and_resumes_are_those_of_eager(tmp_path: Path, options: dict[str, Any]) -> None:
    if "strategy" in options:
        options = {**options, "ssd_dirs": [str(tmp_path)]}
    model, x = case()
    eager = copy.deepcopy(model)
    optimizer = Soap(eager.parameters())
    with job_of(copy.deepcopy(model), x, Soap, **options) as job:
        for step in range(4):
            if step == 2:
                job.save(tmp_path / "saved")
                job.step(x)
                job.resume(tmp_path / "saved")
            job.step(x)
            optimizer.zero_grad()
            mean(eager(x), None).backward()
            optimizer.step()
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(job.state_dict()[name], value, rtol=0, atol=1e-6)


def test_a_trial_of_matrices_stays_small() -> None:
    """`Shampoo` fails where a trial steps a long vector for real."""
    model = nn.Sequential(nn.Linear(8, 6140), nn.Tanh(), nn.Linear(6140, 1))
    spec = OptimizerSpec.from_callable(Shampoo, model=model)
    assert not spec.is_elementwise()
    assert spec.state_shapes((6140,))["GG.0"][0] == (6140, 6140)


@pytest.mark.parametrize(
    "optimizer, told", [(Hides, r"state 'holder' is Holder"), (Mixes, r"'both' is list of Tensor, int")]
)
def test_states_in_which_tensors_hide_are_refused(optimizer: Any, told: str) -> None:
    model, x = case()
    with pytest.raises(PlanError, match=told):
        job_of(model, x, partial(optimizer, lr=1e-2))
