"""Properties of an optimizer, found by steps of small parameters.

`Build` makes an optimizer, with the arguments of one group, on given parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .leaves import row_leaves
from .state_shapes import Build, Shape, step_plainly

TINY = (64, 64)  # large enough that factored and per-tensor states do not count as states per parameter
FAILURES = (TypeError, ValueError, RuntimeError)  # what torch raises when an optimizer cannot work
# Pieces of a matrix that end inside the blocks of 128 and 256 elements which have one scale in states of few bits; the
# matrix and each piece have enough elements (4096) to get such states.
WHOLE, PIECES = (64, 160), (4100, 6140)


@dataclass(frozen=True)
class Traits:
    """The properties of an optimizer's step, tried on one kind of device.

    `divisible`: a step may be several calls, each for some of the parameters, since no group counts the calls.
    `keeps_grads`: a step leaves gradients as they were. `in_place`: states stay the same tensors. `born_empty`: there
    are no states before the first step.
    """

    divisible: bool
    keeps_grads: bool
    in_place: bool
    born_empty: bool

    @staticmethod
    def common(groups: Sequence[Traits]) -> Traits:
        """The properties that hold in every group."""
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


def find_traits(build: Build, device: torch.device) -> Traits:
    """Find the properties of an optimizer's step on this device by three steps of a matrix."""
    param = tiny(TINY, device)
    optimizer = build([param])
    born_empty = not optimizer.state
    (group,) = optimizer.param_groups
    before = {key: value for key, value in group.items() if key != "params"}
    given = torch.linspace(-1.0, 1.0, param.numel(), device=device).reshape(TINY)
    keeps_grads, owners = True, []
    for _ in range(3):
        param.grad = given.clone()
        step_plainly(optimizer)
        keeps_grads = keeps_grads and torch.equal(param.grad, given)
        owners.append({key: state for key, state in row_leaves(optimizer.state[param]).items() if state.numel() > 1})
    return Traits(
        divisible=before == {key: value for key, value in group.items() if key != "params"},
        keeps_grads=keeps_grads,
        in_place=all(owners[1].get(key) is state for key, state in owners[2].items()),
        born_empty=born_empty,
    )


def is_elementwise(build: Build) -> bool:
    """Whether steps update each element by its own gradients alone: tried on a matrix, whole and as two rows."""
    made = torch.Generator().manual_seed(0)
    whole = nn.Parameter(torch.randn(WHOLE, generator=made))
    pieces = [nn.Parameter(piece.detach().clone()) for piece in whole.flatten().split(PIECES)]
    try:
        optimizers = [build([whole]), build(pieces)]
        for _ in range(2):
            whole.grad = torch.randn(WHOLE, generator=made)
            for piece, grad in zip(pieces, whole.grad.flatten().split(PIECES)):
                piece.grad = grad.clone()
            for optimizer in optimizers:
                step_plainly(optimizer)
    except FAILURES:  # an optimizer for matrices only
        return False
    return torch.allclose(torch.cat(list(pieces)), whole.flatten(), rtol=1e-5, atol=1e-7)
