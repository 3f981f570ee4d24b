"""A weight of the loss by any pointwise function of torch is counted over the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.tests.compiler.loss.whole_batch import compile_job, eager_step, job_step

ROWS, LENGTH, CLASSES = 4, 6, 7
TOLERANCE = 1e-5  # fp32: the same terms are added up in another order
RANGES = ((0.2, 0.8), (1.2, 1.8), (-0.4, 1.6))  # one is in the domain of each function; steps are in the last one
LEAST_SUM = 0.5
FREQUENT = ("tanh", "relu", "softplus", "square", "log1p", "sign", "sigmoid")


def pointwise_functions() -> Iterator[tuple[str, Callable[..., Tensor], int]]:
    """Name, function, and the number of its tensors, of all public functions whose operators torch tags as pointwise
    and that need nothing but tensors."""
    for name in sorted(dir(torch.ops.aten)):
        public = getattr(torch, name, None) or getattr(F, name, None)
        if name.startswith("_") or name.endswith("_") or not callable(public):
            continue
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            func = getattr(packet, overload)
            needed = [argument for argument in func._schema.arguments if not argument.has_default_value()]
            is_plain = len(func._schema.returns) == 1 and not func._schema.is_mutable
            is_plain = is_plain and torch.Tag.nondeterministic_seeded not in func.tags
            if torch.Tag.pointwise in func.tags and is_plain and all(str(a.type) == "Tensor" for a in needed):
                yield name, public, len(needed)
                break


def weight_of(function: Callable[..., Tensor], num_tensors: int, score: Tensor, low: float, high: float) -> Tensor:
    operands = [score * (high - low) + low, score.flip(1) * (high - low) + low, score][:num_tensors]
    weight = function(*operands)
    if not isinstance(weight, Tensor):  # of `torch.equal`, whose operator is tagged as well
        raise TypeError(f"{function} returns no tensor")
    return weight.float()


@cache
def weights() -> list[tuple[str, Callable[..., Tensor], int, float, float]]:
    """The functions that make a finite weight of fp32 numbers, with a sum that may be divided by."""
    score, found = torch.linspace(0.0, 1.0, ROWS * LENGTH).view(ROWS, LENGTH), []
    for name, function, num_tensors in pointwise_functions():
        for low, high in RANGES:
            try:
                weight = weight_of(function, num_tensors, score, low, high)
            except (RuntimeError, TypeError):  # of whole numbers or complex ones only
                continue
            usable = weight.shape == score.shape and weight.isfinite().all() and weight.sum().abs() > LEAST_SUM
            if usable and weight.sum(1).unique().numel() > 1:  # else no row weighs more than another one
                found.append((name, function, num_tensors, low, high))
                break
    return found


class Weighted(nn.Module):
    """The mean of the losses of the weights by these functions."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.weights = [options for name, *options in weights() if name in names]
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor, score: Tensor) -> Tensor:
        each = F.cross_entropy(self.head(self.table(ids)).flatten(0, 1), labels.flatten(), reduction="none")
        terms = []
        for options in self.weights:
            weight = weight_of(options[0], options[1], score, *options[2:]).flatten()
            terms.append((each * weight).sum() / weight.sum())
        return torch.stack(terms).mean()


def batch() -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, most, (ROWS, LENGTH), generator=made) for most in (11, CLASSES))
    return {"ids": ids, "labels": labels, "score": torch.linspace(0.0, 1.0, ROWS * LENGTH).view(ROWS, LENGTH)}


@pytest.mark.parametrize("some", [FREQUENT, pytest.param(None, marks=pytest.mark.slow)], ids=["frequent", "any"])
def test_a_weight_by_any_pointwise_function_is_counted_over_the_whole_batch(some: Collection[str] | None) -> None:
    names = [name for name, *_ in weights() if some is None or name in some]
    assert len(names) == len(some) if some is not None else len(names) > 60, names
    model = Weighted(names)
    wanted = eager_step(model, batch())
    for micro_batches in (1, ROWS):
        job: Any = compile_job(model, batch(), 1, "balanced", micro_batches)
        kinds = {name: term.kind for name, term in zip(names, job.folder.settings.loss, strict=True)}
        assert {name: kind for name, kind in kinds.items() if kind != "counted"} == {}
        assert job.folder.settings.rows.couplings == ()
        assert job_step(job, batch()).distance(wanted) <= TOLERANCE
