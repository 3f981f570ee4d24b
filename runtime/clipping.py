"""Gradient norms, clipping and the loss scale of fp16, on whatever device the gradients lie.

A factor on gradients in half precision is kept beside them and applied in fp32 when the optimizer reads them: the loss
scale exists because fp16 cannot hold unscaled gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .program import StageSpec

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass
class Grads:
    """The gradients of one stage by parameter name, all to be multiplied by `factor` where that is given."""

    tensors: dict[str, Tensor]
    factor: Tensor | None = None

    def scale(self, factor: Tensor) -> None:
        exact = [g for g in self.tensors.values() if g.dtype in (torch.float32, torch.float64)]
        if len(exact) == len(self.tensors):
            for grad in exact:
                grad.mul_(factor.to(grad.device, grad.dtype))
        else:
            self.factor = factor if self.factor is None else self.factor * factor

    def scaled(self, factor: Tensor) -> Grads:
        """The same gradients times `factor`, which is applied when they are read: these stay as they are."""
        return Grads(self.tensors, factor if self.factor is None else self.factor * factor)

    def in_full(self) -> dict[str, Tensor]:
        """The gradients with the factor applied: as they are, or in fp32."""
        if self.factor is None:
            return self.tensors
        return {name: g.float() * self.factor.to(g.device, torch.float32) for name, g in self.tensors.items()}


def sum_of_squares(parts: Iterable[tuple[StageSpec, Mapping[str, Tensor]]]) -> Tensor:
    """Over all gradients of these stages, in float64; a tied parameter counts with its owner only."""
    grads = [g for spec, by_name in parts for g in _owned(spec, by_name)]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(g, dtype=_at_least_single(g.dtype)) for g in grads]
    return torch.stack([n.double() for n in norms]).square().sum()


def _owned(spec: StageSpec, grads: Mapping[str, Tensor]) -> Iterable[Tensor]:
    return (grads[p.name] for p in spec.params if p.owner and p.name in grads)


def _at_least_single(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def clip_factor(squares: Tensor, max_norm: float, loss_scale: float) -> Tensor:
    """What to multiply scaled gradients with, given the sum of squares over all of them."""
    norm = squares.sqrt() / loss_scale
    return (max_norm / (norm + EPSILON)).clamp(max=1.0) / loss_scale


def speculative_factor(loss_scale: float) -> Tensor:
    """What a step before the norm is known multiplies scaled gradients with: `clip_factor` where nothing is clipped."""
    return torch.ones((), dtype=torch.float64) / loss_scale


def must_redo(squares: Tensor, max_norm: float, loss_scale: float) -> bool:
    """Whether a speculative step was not what `clip_factor` asks for, or the gradients are not finite."""
    return not bool(clip_factor(squares, max_norm, loss_scale) == speculative_factor(loss_scale))


@dataclass
class LossScale:
    """The factor on the loss in fp16: halved when a gradient overflows, doubled after a while without."""

    scale: float = 65536.0
    good_steps: int = 0
    growth_steps: int = 2000

    def update(self, finite: bool) -> None:
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
        elif self.good_steps + 1 >= self.growth_steps:
            self.scale, self.good_steps = min(self.scale * 2, 2.0**24), 0
        else:
            self.good_steps += 1
