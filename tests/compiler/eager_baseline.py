"""The same model trained by plain PyTorch, to compare a job with: micro-batches, optimizer and seeds are the job's."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from penstock.compiler.check.model_draws import ModelDraws
from penstock.compiler.job.job import Job
from penstock.compiler.job.state import whole_state
from penstock.runtime.model_names import ties_of
from penstock.runtime.optimizer.stage_optimizer import OptimizerSpec
from penstock.runtime.stage.draws import micro_batch_seed
from penstock.runtime.state.part_params import PartJoiner
from penstock.tests.zoo import without_cache, zoo

# With this optimizer the momentum buffers after n steps are a weighted sum of the n gradients, so that comparing them
# compares the gradient of every parameter in every step; after the first step they are the gradients, bit for bit.
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.5)
MICRO_BATCHES = 4


def zoo_case(name: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a global batch of MICRO_BATCHES different micro-batches."""
    make = zoo()[name]
    model, first = make(dropout=dropout)
    parts = [first, *(make(dropout=dropout, seed=seed)[1] for seed in range(1, MICRO_BATCHES))]
    return model, {key: torch.cat([part[key] for part in parts]) for key in first}


class Eager:
    """Trains a copy of the model on one device. `seeds` repeats the random numbers of a job with a single stage."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = SGD,
        *,
        lr_scheduler: Any = None,
        micro_batches: int = MICRO_BATCHES,
        max_grad_norm: float | None = None,
        loss_of: Callable[[nn.Module, Any], Tensor] | None = None,
        seed: int = 0,
    ):
        self.model = without_cache(copy.deepcopy(model))
        self.draws = ModelDraws(self.model, torch.device("cpu"))
        self.micro_batches, self.max_grad_norm, self.seed = micro_batches, max_grad_norm, seed
        self.loss_of = loss_of or loss_of_output
        self.params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        spec = OptimizerSpec.from_callable(optimizer, lr_scheduler)
        self.optimizer = spec.build(self.params.values())
        self.scheduler = spec.build_scheduler(self.optimizer)
        self.step_count = 0
        self.gradient_norm = 0.0

    def step(self, batch: Any) -> Tensor:
        """One step; the mean loss over the micro-batches."""
        losses = []
        self.optimizer.zero_grad()
        for m in range(self.micro_batches):
            with self.draws.seed_draws([micro_batch_seed(self.seed, self.step_count, m)], batch):
                loss = self.loss_of(self.model, part_of(batch, m, self.micro_batches))
            loss.backward(torch.full_like(loss, 1 / self.micro_batches))
            losses.append(loss.detach())
        if self.max_grad_norm is not None:
            found = torch.nn.utils.clip_grad_norm_(self.params.values(), self.max_grad_norm)
            self.gradient_norm = float(found)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.step_count += 1
        return torch.stack(losses).mean()

    def evaluate(self, batch: Any) -> Tensor:
        """The mean loss over the micro-batches in evaluation mode."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        with torch.no_grad():
            parts = [self.loss_of(self.model, part_of(batch, m, self.micro_batches)) for m in range(self.micro_batches)]
        for module, training in modes.items():
            module.training = training
        return torch.stack(parts).mean()

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name to the tensors of its optimizer state."""
        return {
            name: {key: value for key, value in self.optimizer.state[p].items() if isinstance(value, Tensor)}
            for name, p in self.params.items()
            if p in self.optimizer.state
        }


def loss_of_output(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    output = model(**batch)
    return output if isinstance(output, Tensor) else output["loss"]


def part_of(batch: Any, micro_batch: int, count: int) -> Any:
    """The micro-batch of a global batch: an equal slice of every tensor along its first dimension."""
    return tree_map(lambda t: t.chunk(count)[micro_batch] if isinstance(t, Tensor) else t, batch)


def optimizer_states(job: Job) -> dict[tuple[str, str], dict[str, Tensor]]:
    """(stage, parameter) to the tensors of its optimizer state, as the devices hold them: a tied one in each stage, one
    in parts in the stage of its last part."""
    found: dict[tuple[str, str], dict[str, Tensor]] = defaultdict(dict)
    parts: dict[str, PartJoiner] = defaultdict(PartJoiner)
    for stage in job.driver.setup.stage_devices:
        spec = job.folder.interface.stages[stage]
        state = whole_state(job.driver, spec)
        by_key: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, row in (state.optimizer["states"] if state.optimizer is not None else {}).items():
            for key, tensor in row.items():
                by_key[key][name] = tensor
        for key, tensors in by_key.items():
            for name, tensor in parts[key].add(spec.params, tensors).items():
                found[stage, name][key] = tensor
    return found


def assert_same_states(job: Job, eager: Eager, tolerance: float) -> None:
    """The optimizer's states of every stage are eager's, those of tied parameters under each of their names."""
    ties, expected = ties_of(job.model), eager.states()
    found = optimizer_states(job)
    assert {ties.get(name, name) for _, name in found} == set(expected)
    for (_, name), row in found.items():
        assert_close(row, expected[ties.get(name, name)], tolerance, name)


def assert_trains_like_eager(job: Job, batch: Any, tolerance: float = 0.0, **options: Any) -> None:
    """Losses, every gradient and the updated weights of three steps; `options` are those of `Eager`."""
    eager = Eager(job.model, **options)
    with job:
        for _ in range(3):
            assert_close({"loss": job.step(batch)}, {"loss": eager.step(batch)}, tolerance and 1e-6)
        assert_same_states(job, eager, tolerance)
        assert_close(job.state_dict(), eager.model.state_dict(), tolerance)


def assert_steps_like_eager(job: Job, eager: Eager, batch: Any, tolerance: float, steps: int = 2) -> None:
    """Losses and the norms that gradients are clipped by, of some steps of a job that runs, and then the optimizer's
    states: momentum shows every gradient."""
    for _ in range(steps):
        assert float(job.step(batch)) == pytest.approx(float(eager.step(batch)), rel=1e-6)
        assert job.last is not None and job.last.gradient_norm == pytest.approx(eager.gradient_norm, rel=1e-5)
    assert_same_states(job, eager, tolerance)


def assert_close(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor], tolerance: float, what: str = "") -> None:
    """Equal names, and entries that differ by at most `tolerance` times the largest entry; 0 means bit for bit."""
    assert set(found) == set(expected)
    for name, want in expected.items():
        where = f"{what} {name}"
        if tolerance == 0.0:
            assert torch.equal(found[name], want), f"{where}: differs by {(found[name] - want).abs().max()}"
        else:
            largest = float(want.abs().max()) if want.numel() else 0.0
            differs = float((found[name].double() - want.double()).abs().max()) if want.numel() else 0.0
            assert differs <= tolerance * max(largest, 1e-3), f"{where}: differs by {differs}, largest {largest}"
