"""Models that something else divides or compiles, and wrong arguments, are refused before anything is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import penstock
from penstock.ir.errors import PlanError


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))


def shard() -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model, mesh=distributed.device_mesh.init_device_mesh("cpu", (1,)))
    return model


def wrap() -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(net(), device_id=torch.device("cpu"))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)), "'0' has 'weight' without a shape"),
    "lazy buffers": (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(6, 1)), "without a shape"),
    "DataParallel": (lambda: nn.DataParallel(net()), "it is wrapped in DataParallel"),
    "DDP": (lambda: nn.parallel.DistributedDataParallel(net()), "it is wrapped in DistributedDataParallel"),
    "DDP inside": (
        lambda: nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(6, 6)), nn.Linear(6, 1)),
        "'0' is wrapped in DistributedDataParallel",
    ),
    "FSDP": (wrap, "it is wrapped in FullyShardedDataParallel"),
    "FSDP2": (shard, "'0' has 'weight' as a DTensor"),
    "torch.jit": (lambda: torch.jit.trace(net(), torch.zeros(4, 6)), "compiled by torch.jit or torch.export"),
    "torch.export": (lambda: torch.export.export(net(), (torch.zeros(4, 6),)).module(), "torch.jit or torch.export"),
}


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_in_another_form_is_refused(kind: str) -> None:
    make, words = MODELS[kind]
    with pytest.raises(PlanError, match=words):
        penstock.compile(make(), "laptop-16gb", example_inputs=torch.zeros(4, 6), loss_fn=lambda out, _: out.mean())


def loss_of(out: torch.Tensor, _: object) -> torch.Tensor:
    return out.mean()


@pytest.mark.parametrize("search_s", [-1, float("nan"), "3", None, True])
def test_work_that_is_no_number_of_seconds_is_refused(search_s: Any) -> None:
    message = rf"search_s={search_s!r}; it is seconds of work, 0 or more: 0 keeps the first plan that fits"
    with pytest.raises(PlanError, match=message):
        penstock.compile(net(), "laptop-16gb", example_inputs=torch.zeros(4, 6), loss_fn=loss_of, search_s=search_s)


def test_no_work_keeps_the_first_plan_that_fits() -> None:
    plan = penstock.compile(
        net(), "laptop-16gb", example_inputs=torch.zeros(4, 6), loss_fn=loss_of, search_s=0, check=False
    ).plan
    assert plan.predicted is not None
    assert any(rival.reason == "not tried: out of time" for rival in plan.rivals)


@pytest.mark.parametrize(
    ("name", "near"),
    [("optimiser", "optimizer"), ("scheduler", "lr_scheduler"), ("microbatches", "micro_batches"),
     ("lr", "optimizer, as in optimizer=partial"), ("batch", "example_inputs")],
)  # fmt: skip
def test_an_unknown_keyword_names_the_nearest(name: str, near: str) -> None:
    message = rf"compile\({name}=\.\.\.\): there is no such argument; the nearest is {near}.* There are model, hardware"
    with pytest.raises(PlanError, match=message):
        penstock.compile(net(), "laptop-16gb", **{name: 1})


def test_a_fourth_argument_without_a_name_is_refused() -> None:
    message = r"compile\(model, hardware, example_inputs\) got 4 arguments.*optimizer=\.\.\."
    with pytest.raises(PlanError, match=message):
        penstock.compile(net(), "laptop-16gb", torch.zeros(4, 6), torch.optim.SGD)  # type: ignore[misc]
