"""One eager forward and backward over a whole global batch, and how far a job's step is from it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock

ROWS, LENGTH = 8, 32
COUNTS = (32, 4, 20, 8, 16, 30, 6, 10)  # labels of a row that are not ignored
PLAIN = partial(torch.optim.SGD, lr=1.0)  # one step of it changes each weight by its gradient


@dataclass(frozen=True)
class Step:
    """A loss, and the gradient of every parameter."""

    loss: float
    gradients: dict[str, Tensor]

    def distance(self, other: Step) -> float:
        """The larger of two relative differences: of the losses, and of all gradients by 2-norm."""
        loss = abs(self.loss - other.loss) / max(abs(other.loss), 1e-30)
        apart = [(value - other.gradients[name]).double().square().sum() for name, value in self.gradients.items()]
        norm = torch.stack([value.double().square().sum() for value in other.gradients.values()]).sum().sqrt()
        return max(loss, float(torch.stack(apart).sum().sqrt() / norm))


def eager_step(model: nn.Module, batch: Any, loss_of: Callable[[nn.Module, Any], Tensor] | None = None) -> Step:
    """One forward and one backward over all rows."""
    model = copy.deepcopy(model)
    output = loss_of(model, batch) if loss_of is not None else model(**batch)
    loss = output if isinstance(output, Tensor) else output["loss"]
    loss.backward()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return Step(
        float(loss.detach()), {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in params.items()}
    )


def compile_job(model: nn.Module, batch: Any, devices: int, strategy: str, micro_batches: int, **options: Any) -> Any:
    """A job whose step changes every weight by its gradient."""
    hardware = penstock.Hardware.cpu(num_devices=devices, memory="256MB", dram="2GB")
    options = {"optimizer": PLAIN, "strategy": strategy, "micro_batches": micro_batches, **options}
    return penstock.compile(copy.deepcopy(model), hardware, example_inputs=batch, **options)


def job_step(job: penstock.Job, batch: Any) -> Step:
    """One step of a job that `compile_job` has made; the job is closed. `evaluate` gives the loss of the step."""
    with job:
        before = {n: p.detach().clone() for n, p in job.model.named_parameters() if p.requires_grad}
        evaluated = float(job.evaluate(batch)["loss"])
        loss = float(job.step(batch))
        after = job.state_dict()
    assert abs(evaluated - loss) <= 1e-5 * abs(loss)
    return Step(loss, {name: value - after[name] for name, value in before.items()})


def token_rows(counts: tuple[int, ...] = COUNTS, *, vocabulary: int = 90, seed: int = 0) -> dict[str, Tensor]:
    """Token ids, and labels of which each row keeps the first few."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (len(counts), LENGTH), generator=made)
    labels = ids.clone()
    for row, count in enumerate(counts):
        labels[row, count:] = -100
    return {"input_ids": ids, "labels": labels}
