"""One job and plain PyTorch with the same optimizers: what tests of optimizers in jobs compare."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.tests.compiler.eager_baseline import zoo_case

MICRO_BATCHES = 1  # with several, plans with SSD add up gradients in another order than eager PyTorch
SSD = (
    "coarsen, partition-min-stage, map-round-robin, schedule-pipeline, choose-activations, insert-fetch{swap=true}, "
    "insert-ssd{tier=all}, overlap-optimizer{clip=speculative}"
)
STRATEGIES = {"device": "gpipe", "dram": "mobius", "ssd": SSD}


@dataclass(frozen=True)
class Case:
    """`groups`: patterns of names to the optimizer of these parameters; `optimizer` has the rest."""

    optimizer: Callable[..., torch.optim.Optimizer]
    groups: Mapping[tuple[str, ...], Callable[..., torch.optim.Optimizer]] = field(default_factory=dict)

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]] | None:
        rows = [{"params": list(patterns), "optimizer": own} for patterns, own in self.groups.items()]
        return rows or None

    def eager(self, params: Mapping[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        """The loop that a user without Penstock writes."""
        rest, made = dict(params), []
        for patterns, own in self.groups.items():
            names = [name for name in rest if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
            made.append(own([rest.pop(name) for name in names]))
        return [*made, self.optimizer(list(rest.values()))] if rest else made


@dataclass
class Trained:
    losses: list[float]
    weights: dict[str, Tensor]
    state_bytes: int = 0


def train_eagerly(
    model: nn.Module, batch: Mapping[str, Tensor], case: Case, steps: int, max_norm: float | None = None
) -> Trained:
    model = copy.deepcopy(model).train()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizers, losses = case.eager(params), []
    for _ in range(steps):
        loss = model(**batch)["loss"]
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(params.values(), max_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Trained(losses, model.state_dict())


def train_job(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    case: Case,
    steps: int,
    where: str,
    folder: Path,
    *,
    max_norm: float | None = None,
    resume_at: int = 0,
    num_devices: int = 1,
    **options: Any,
) -> Trained:
    """A job of these steps, closed, made anew and resumed before step `resume_at`, if that is given."""
    disk = {"ssd": "20GB", "ssd_dir": folder} if where == "ssd" else {}
    hardware = penstock.Hardware.cpu(num_devices=num_devices, memory="1GB", dram="2GB", **disk)

    def compile_job() -> penstock.Job:
        return penstock.compile(
            copy.deepcopy(model), hardware, example_inputs=batch, optimizer=case.optimizer,
            param_groups=case.param_groups, micro_batches=MICRO_BATCHES,
            max_grad_norm=max_norm, **{"strategy": STRATEGIES[where], **options},
        )  # fmt: skip

    losses: list[float] = []
    job = compile_job()
    try:
        for step in range(steps):
            if resume_at and step == resume_at:
                job.save(folder / "saved")
                job.close()
                job = compile_job()
                job.resume(folder / "saved")
            losses.append(float(job.step(batch)))
        return Trained(losses, {name: tensor.clone() for name, tensor in job.state_dict().items()})
    finally:
        job.close()


def assert_same(found: Trained, want: Trained, rel: float = 0.0) -> None:
    """The same bits, or with `rel` nearly."""
    if not rel:
        assert found.losses == want.losses
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(want.losses), rtol=rel, atol=rel)
    for name, tensor in want.weights.items():
        near = torch.allclose(found.weights[name], tensor, rtol=rel, atol=rel)
        assert near if rel else torch.equal(found.weights[name], tensor), name


def assert_is_itself(case: Case, where: str, directory: Path, steps: int = 4) -> None:
    """A job whose states lie there, saved and resumed after two steps, ends as plain PyTorch does."""
    model, batch = zoo_case("gpt2")
    want = train_eagerly(model, batch, case, steps)
    assert_same(train_job(model, batch, case, steps, where, directory, resume_at=2), want)
