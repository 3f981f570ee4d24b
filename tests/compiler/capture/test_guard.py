"""Functions are replaced for a trace in its own thread: on others a device may be at work on a step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from penstock.compiler.capture.guard import replace_functions


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def test_other_threads_keep_what_was_there() -> None:
    module, x, seen = nn.Identity(), torch.ones(2), []
    call, apply = nn.Module.__dict__["__call__"], torch.autograd.Function.__dict__["apply"]

    def on_call(own: nn.Module, *args: torch.Tensor) -> str:
        seen.append("call")
        return "replaced"

    def on_apply(kind: type, *args: torch.Tensor) -> str:
        seen.append(kind.__name__)
        return "replaced"

    changes = (nn.Module, "__call__", on_call), (torch.autograd.Function, "apply", classmethod(on_apply))
    with ThreadPoolExecutor(1) as other, replace_functions(*changes):
        assert module(x) == Twice.apply(x) == "replaced"
        assert other.submit(module, x).result() is x
        assert torch.equal(other.submit(Twice.apply, x).result(), 2 * x)
    assert seen == ["call", "Twice"]
    assert nn.Module.__dict__["__call__"] is call and torch.autograd.Function.__dict__["apply"] is apply
