"""The release of PyTorch: those that the tests are run with, and the self-check of a newer one.

Penstock uses functions of PyTorch that may change without notice. In: the release that is
installed. A tested one is taken as it is. Of a newer one a warning says, once a process, what was checked and what
failed; what failed is refused where it is asked for: backwards in halves by `schedule-zero-bubble`, a private name at
its first use. A model that is captured otherwise than eager computes it is refused at once.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import CaptureError, PlanError
from ...runtime import torch_names
from ...runtime.stage.split_backward import wrong_halves
from ..capture.trace import trace
from ..stale import level_of_user

OLDEST, NEWEST = (2, 13), (2, 15)  # `make versions` runs the tests with these and those between
MEMORY_OF = "2.13"  # whose C++ `graph/operators/workspace` and `graph/kernels` follow (docs/versions.md)
TESTED = ".".join(map(str, OLDEST)) + " to " + ".".join(map(str, NEWEST))


@functools.cache
def check_release(version: str) -> None:
    """Warn of a PyTorch that is newer than those tested. Raises `PlanError` where it is older than these, or captures
    a small model wrongly."""
    release = release_of(version)
    if release is None or OLDEST <= release <= NEWEST:
        return
    if release < OLDEST:
        raise PlanError(f"torch {version} is older than Penstock works with; install torch {TESTED}")
    failed = captured_wrongly()
    if failed:
        raise PlanError(
            f"torch {version} is newer than those that Penstock is tested with, and {failed}: install torch {TESTED}"
        )
    failures = [text for check in (missing_names, wrong_halves) if (text := check())]
    found = f"found that {'; '.join(failures)}. What needs it is refused" if failures else "found no fault"
    warnings.warn(
        f"torch {version} is newer than those that Penstock is tested with ({TESTED}). A self-check of the private "
        f"names of torch, a captured model and backwards in halves {found}. The memory of CUDA's kernels is counted as "
        f"in torch {MEMORY_OF}",
        stacklevel=level_of_user(),
    )


def release_of(version: str) -> tuple[int, int] | None:
    """The release of a version such as `2.13.0+cpu`; None for a build that is named otherwise."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def missing_names() -> str:
    """The private names of torch that are imported at their first use and are not there."""
    missing = []
    for name in torch_names.LATE:
        try:
            getattr(torch_names, name)
        except PlanError:
            missing.append(".".join(filter(None, torch_names.LATE[name])))
    return f"it has no {', '.join(missing)}" if missing else ""


def captured_wrongly() -> str:
    """The difference between a small model and its captured step: loss, gradients, and a function that was taken from
    its class."""
    made = torch.Generator().manual_seed(0)
    model, batch = _Sample(made), torch.randn(4, 4, generator=made)
    try:
        graph = trace(model, batch)
    except CaptureError as error:
        return f"a small model is not captured: {error}"
    wanted, found = (_step(run, model, batch) for run in (model, graph.module))
    functions = [n for n in graph.nodes if getattr(n.target, "__self__", None) is _Doubled]
    is_same = all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    return "" if is_same and len(functions) == 1 else "the captured step of a small model is not the model's own"


def _step(run: Callable[..., Any], model: nn.Module, batch: Tensor) -> list[Tensor]:
    loss = run(batch)
    loss = loss["loss"] if isinstance(loss, dict) else loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


class _Doubled(torch.autograd.Function):
    """A function whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2.0


_doubled = _Doubled.apply


class _Sample(nn.Module):
    def __init__(self, made: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, generator=made))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x @ self.weight).relu_()
        doubled: Tensor = _doubled(h)
        return doubled.square().mean()
