"""Does the same training steps with a job and with eager PyTorch on the same device, and compares the results."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.compiler.check.eager import Eager, module_runner
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec

# Every step moves the weights by the gradients so far, so the difference at the end compares all gradients.
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
STEPS, MICRO_BATCHES = 3, 2

# Relative differences of the loss and of the weights' change. In fp32 the same kernels run, except for sums of
# gradients of shared weights and an optimizer on the CPU, which round separately: a few times 2^-24. In low precision
# both sides round every value to 8 or 11 bits, but only one of them may keep a value in fp32 across a border.
LIMITS = {"fp32": (1e-6, 1e-5), "bf16": (5e-3, 3e-2), "fp16": (5e-3, 3e-2)}


@dataclass(frozen=True)
class Parity:
    """The result of a comparison. `loss` is the largest relative difference of a step's loss, `weights` the 2-norm of
    the difference of all weights over that of eager's change. `bitwise`: all losses and weights are equal."""

    loss: float
    weights: float
    bitwise: bool

    def fits(self, precision: str) -> bool:
        loss, weights = LIMITS[precision]
        return self.loss <= loss and self.weights <= weights


@dataclass
class Trained:
    """Losses by step, weights and buffers by name on the CPU."""

    losses: list[float]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]


def exact_arithmetic() -> None:
    """Turn TF32 off and deterministic kernels on. CUBLAS_WORKSPACE_CONFIG must be set when the process starts."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def train_job(job: penstock.Job, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    losses = [float(job.step(batch)) for batch in batches]
    named = {name: value.detach().cpu().clone() for name, value in job.state_dict().items()}
    aliases = dict(job.model.named_parameters(remove_duplicate=False))
    weights = {name: named[name] for name, _ in job.model.named_parameters()}
    return Trained(losses, weights, {name: value for name, value in named.items() if name not in aliases})


def train_eager(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], device: str, precision: str = "fp32",
    optimizer: Any = SGD, micro_batches: int = MICRO_BATCHES, max_grad_norm: float | None = None,
) -> Trained:  # fmt: skip
    """Train a copy of the model, with the random numbers that a plan draws."""
    mine = copy.deepcopy(model).to(device).train()
    place = next(mine.parameters()).device
    eager = Eager(
        mine, module_runner(mine, precision), OptimizerSpec.from_callable(optimizer), micro_batches=micro_batches,
        precision=precision, max_grad_norm=max_grad_norm,
    )  # fmt: skip
    losses = [eager.step({name: value.to(place) for name, value in batch.items()}) for batch in batches]
    weights = {name: master.detach().cpu() for name, master in eager.masters.items()}
    return Trained(losses, weights, {name: b.cpu() for name, b in mine.named_buffers()})


def compare(found: Trained, wanted: Trained, start: Mapping[str, Tensor]) -> Parity:
    """Compare two trained models. `start` has the weights before training."""
    assert set(found.weights) == set(wanted.weights)
    moved = distance(wanted.weights, start)
    apart = distance(found.weights, wanted.weights)
    loss = max(abs(a - b) / abs(b) for a, b in zip(found.losses, wanted.losses, strict=True))
    equal = all(torch.equal(found.weights[name], value) for name, value in wanted.weights.items())
    return Parity(loss, apart / moved, equal and found.losses == wanted.losses)


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The 2-norm of the difference over all tensors of `left`."""
    squares = [(value.double() - right[name].double()).square().sum() for name, value in left.items()]
    return float(torch.stack(squares).sum().sqrt())


def start_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}
