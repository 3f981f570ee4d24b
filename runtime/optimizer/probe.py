"""What stepping small parameters tells about an optimizer.

`Build` makes an optimizer, with the arguments of one group, on given parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .state_shapes import SMALL, Shape

Build = Callable[[Sequence[Tensor]], torch.optim.Optimizer]

TINY = (64, 64)  # large enough that factored and per-tensor states do not count as states per parameter
FAILURES = (TypeError, ValueError, RuntimeError)  # what torch raises when an optimizer cannot work


@dataclass(frozen=True)
class Traits:
    """How an optimizer steps, tried on one kind of device.

    `divisible`: a step may be several calls, each for some of the parameters, since no group counts the calls.
    `keeps_grads`: a step leaves gradients as they were. `in_place`: states stay the same tensors. `born_empty`: there
    are no states before the first step.
    """

    divisible: bool
    keeps_grads: bool
    in_place: bool
    born_empty: bool

    @staticmethod
    def of_all(groups: Sequence[Traits]) -> Traits:
        """What holds in every group."""
        return Traits(
            all(t.divisible for t in groups),
            all(t.keeps_grads for t in groups),
            all(t.in_place for t in groups),
            all(t.born_empty for t in groups),
        )


def tiny(shape: Shape, device: Any = "cpu", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A parameter of ones, with a gradient of ones."""
    param = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
    param.grad = torch.ones_like(param)
    return param


def states_of(build: Build, shape: Shape) -> dict[str, Tensor]:
    """The states of one parameter after two steps."""
    param = tiny(shape)
    optimizer = build([param])
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return {name: s for name, s in optimizer.state[param].items() if isinstance(s, Tensor)}


def state_kinds(build: Build, ndim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """All states of one small parameter of `ndim` dimensions, numbers included, after one step and after two."""
    param = tiny(SMALL[:ndim])
    optimizer = build([param])
    seen = []
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
        seen.append({name: state for name, state in optimizer.state[param].items() if state is not None})
    return seen[0], seen[1]


def find_traits(build: Build, device: torch.device) -> Traits:
    """How an optimizer steps on this device, by three steps of a matrix."""
    param = tiny(TINY, device)
    optimizer = build([param])
    born_empty = not optimizer.state
    (group,) = optimizer.param_groups
    before = {key: value for key, value in group.items() if key != "params"}
    given = torch.linspace(-1.0, 1.0, param.numel(), device=device).reshape(TINY)
    keeps_grads, owners = True, []
    for _ in range(3):
        param.grad = given.clone()
        optimizer.step()
        keeps_grads = keeps_grads and torch.equal(param.grad, given)
        owners.append({k: s for k, s in optimizer.state[param].items() if isinstance(s, Tensor) and s.numel() > 1})
    return Traits(
        divisible=before == {key: value for key, value in group.items() if key != "params"},
        keeps_grads=keeps_grads,
        in_place=all(owners[1].get(key) is state for key, state in owners[2].items()),
        born_empty=born_empty,
    )


def is_elementwise(build: Build) -> bool:
    """Whether two steps update each element by its own gradients alone: tried on a matrix, whole and as two rows."""
    made = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(4, 6, generator=made))
    pieces = [nn.Parameter(piece.detach().clone()) for piece in whole.flatten().split(12)]
    try:
        optimizers = [build([whole]), build(pieces)]
        for _ in range(2):
            whole.grad = torch.randn(4, 6, generator=made)
            for piece, grad in zip(pieces, whole.grad.flatten().split(12)):
                piece.grad = grad.clone()
            for optimizer in optimizers:
                optimizer.step()
    except FAILURES:  # an optimizer for matrices only
        return False
    return torch.allclose(torch.cat(list(pieces)), whole.flatten(), rtol=1e-5, atol=1e-7)
