"""The identity of the frozen weights that a checkpoint goes with but does not hold: names, shapes and a sample of their
values.

In: a source of weights and the frozen parameters. Out: a digest that costs a few rows of a few dozen tensors, whatever
the size of the model. It is the same for a model in memory and for the files that it was loaded from, however these are
cut, and whatever floating type they have, as long as that holds the same numbers. Bases that differ only where nothing
was sampled are taken for one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ir.program import ParamSpec, RowPart, whole_params
from .weights import WeightSource

SAMPLED_TENSORS = 32
SAMPLED_PACKED = 4  # of quantised tensors
SAMPLED_ELEMENTS = 4096  # of a tensor


@dataclass(frozen=True)
class BaseIdentity:
    """`name` is for people, `digest` is what counts."""

    name: str
    digest: str

    def __str__(self) -> str:
        return f"{self.name} ({self.digest[:12]})"


def frozen_params(params: Iterable[ParamSpec]) -> tuple[ParamSpec, ...]:
    """The parameters that no step changes: a checkpoint need not hold them."""
    return tuple(param for param in params if not param.requires_grad and not param.change)


def base_identity(name: str, source: WeightSource, frozen: Iterable[ParamSpec]) -> BaseIdentity:
    """The identity of the base that `source` holds the `frozen` parameters of."""
    params = {source.ties.get(p.name, p.name): p for p in whole_params(list(frozen))}
    canonical = {each: p.shape for each, p in params.items()}
    packed = {each for each, p in params.items() if not getattr(torch, p.dtype).is_floating_point}
    names = sorted(canonical)
    digest = hashlib.sha256(json.dumps([[each, list(canonical[each])] for each in names]).encode())
    fresh = set(getattr(source, "fresh_names", ()))  # of values drawn from a seed all are looked at
    # Stacks of experts may be many tensors in the files, to be put together first; quantised ones may be packed first.
    plain = [each for each in names if len(canonical[each]) <= 2 and each not in fresh | packed]
    codes = sorted(each for each in packed if len(canonical[each]) == 2)  # others are scales and tables
    chosen = [*_spread(plain, SAMPLED_TENSORS), *_spread(codes, SAMPLED_PACKED), *sorted(fresh & set(names))]
    for each in chosen or names[:1]:
        digest.update(_sample(source, each, canonical[each]).numpy().tobytes())
    return BaseIdentity(name, digest.hexdigest())


def _spread(names: Sequence[str], most: int) -> list[str]:
    count = min(most, len(names))
    return [names[i * len(names) // count] for i in range(count)]


def _sample(source: WeightSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Elements from the beginning of a tensor's middle row on."""
    if len(shape) < 2:
        rows = source.read(name)
    else:
        middle = shape[0] // 2
        end = min(shape[0], middle + max(1, SAMPLED_ELEMENTS // math.prod(shape[1:])))
        rows = source.read_rows(RowPart(name, middle, end, shape[0]))
    found = rows.flatten()[:SAMPLED_ELEMENTS].detach().cpu()
    return found.to(torch.float32) if found.is_floating_point() else found.to(torch.int64)
