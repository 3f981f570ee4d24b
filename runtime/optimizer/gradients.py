"""Gradient norms, clipping and the loss scale of fp16, on whatever device has the gradients.

A factor on gradients in half precision is kept beside them and applied in fp32 when the optimizer reads them: the loss
scale exists because fp16 cannot hold unscaled gradients.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...ir.program import StageSpec, TeamPart

EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass
class Grads:
    """The gradients of one stage by parameter name, to be multiplied by `factor` if that is given. `flats`: the
    contiguous buffers that hold all of them, if there are any. `part`: "own" or "shared" if the gradients of
    parameters that stages share are kept apart."""

    tensors: dict[str, Tensor]
    factor: Tensor | None = None
    flats: Sequence[Tensor] = field(default=(), kw_only=True)
    part: str = field(default="", kw_only=True)

    def scale(self, factor: Tensor) -> None:
        exact = [g for g in self.tensors.values() if g.dtype in (torch.float32, torch.float64)]
        if len(exact) == len(self.tensors):
            for grad in exact:
                grad.mul_(factor.to(grad.device, grad.dtype))
        else:
            self.factor = factor if self.factor is None else self.factor * factor

    def with_factor(self, factor: Tensor) -> Grads:
        """The same gradients times `factor`, which is applied when they are read: these stay as they are."""
        return Grads(self.tensors, factor if self.factor is None else self.factor * factor)

    def times(self, factor: Tensor) -> Tensor | None:
        """The factor by which an optimizer that reads these gradients multiplies them, in place of `scale(factor)`,
        which changes them; the bits are the same. None for a factor of 1."""
        if self.factor is not None:
            factor = self.factor * factor.to(self.factor.device)
        return None if bool(factor == 1.0) else factor

    def to_full(self) -> dict[str, Tensor]:
        """The gradients with the factor applied: as they are, or in fp32 (fp64 stays)."""
        if self.factor is None:
            return self.tensors
        return {name: times_in_full(grad, self.factor) for name, grad in self.tensors.items()}


def times_in_full(grad: Tensor, factor: Tensor) -> Tensor:
    """A gradient times a factor, in fp32, or in fp64 for a gradient in fp64."""
    dtype = _full_dtype(grad.dtype)
    return grad.to(dtype) * factor.to(grad.device, dtype)


def sum_of_squares(parts: Iterable[tuple[StageSpec, Mapping[str, Tensor]]], holders: int = 1) -> Tensor:
    """Over all gradients of these stages, in float64; a tied parameter counts with its owner only. The sum is on the
    host if any of them are there. `holders`: the number of devices whose sums are added up and which have the same
    gradient of a parameter, unless each has a part of that."""
    owned = ((p, by_name) for spec, by_name in parts for p in spec.params if p.owner and p.name in by_name)
    rows = [(param, by_name[param.name]) for param, by_name in owned]
    if not rows:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(g, dtype=_full_dtype(g.dtype)) for _, g in rows]
    where = next((n.device for n in norms if n.device.type == "cpu"), norms[0].device)
    squares = torch.stack([n.to(where, torch.float64) for n in norms]).square()
    if holders > 1:
        squares /= torch.tensor([1 if isinstance(p.part, TeamPart) else holders for p, _ in rows], device=where)
    return squares.sum()


def _full_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def clip_factor(squares: Tensor, max_norm: float, loss_scale: float) -> Tensor:
    """The factor on scaled gradients, given the sum of squares over all of them, in float64.

    It is that of `torch.nn.utils.clip_grad_norm_`, also if the norm is not finite: an infinite one gives 0, a NaN gives
    NaN, so that all weights become NaN. With a loss scale such a step is not made at all.
    """
    norm = squares.sqrt() / loss_scale
    return (max_norm / (norm + EPSILON)).clamp(max=1.0) / loss_scale


def speculative_factor(loss_scale: float) -> Tensor:
    """The factor on scaled gradients in a step before the norm is known: `clip_factor` if nothing is clipped."""
    return torch.ones((), dtype=torch.float64) / loss_scale


class Verdict(enum.Enum):
    """The outcome of a speculative step, once the norm is known."""

    KEEP = "keep"  # it was the right one
    REDO = "redo"  # undo it, and step with the clipped gradients
    UNDO = "undo"  # undo it: the gradients overflowed, and neither optimizer nor schedule takes this step


def must_redo(squares: Tensor, max_norm: float, loss_scale: float) -> bool:
    """Whether clipping changes the factor of a speculative step, which is so for a NaN norm, too.

    Not `norm > max_norm`: EPSILON makes clipping begin a little earlier, and rounding decides at the edge.
    """
    clipped = clip_factor(squares, max_norm, loss_scale)
    return not bool(clipped == speculative_factor(loss_scale).to(clipped.device))


def judge(squares: Tensor, max_norm: float, loss_scale: float | None) -> Verdict:
    """The verdict on a speculative step. If `loss_scale` is None, gradients that are not finite count, as they do in
    eager PyTorch."""
    if loss_scale is not None and not bool(torch.isfinite(squares)):
        return Verdict.UNDO
    return Verdict.REDO if must_redo(squares, max_norm, loss_scale or 1.0) else Verdict.KEEP


@dataclass
class LossScale:
    """The factor on the loss in fp16: halved when a gradient overflows, doubled after `growth_steps` without."""

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


class LossScales:
    """The loss scales of the mini-batches of an asynchronous step. That of mini-batch k knows the norms of those before
    k - `lag`: later ones are not known on every device when its backward begins. Several threads may note a norm."""

    def __init__(self, start: LossScale, lag: int):
        self.lag = lag
        self._after = [replace(start)]  # after 0, 1, ... norms
        self.skipped = 0
        self._lock = threading.Lock()

    def scale_of(self, mini_batch: int) -> float:
        return self._after[max(0, mini_batch - self.lag)].scale

    def note(self, mini_batch: int, finite: bool) -> None:
        """The norm of a mini-batch's gradients is known; each stage that is updated with them says so."""
        with self._lock:
            if mini_batch == len(self._after) - 1:
                found = replace(self._after[-1])
                found.update(finite)
                self._after.append(found)
                self.skipped += not finite

    @property
    def last(self) -> LossScale:
        """After all norms that are known."""
        return self._after[-1]
