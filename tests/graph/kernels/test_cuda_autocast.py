"""Autocast with CUDA's rules on CPU tensors: dtypes as on a GPU, gone with the context."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from penstock.graph.kernels.cuda_autocast import autocast_as

LOW, FULL = torch.bfloat16, torch.float32

# What a CUDA device gives for bf16 operands under autocast; the test marked gpu asks one.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "layer norm": (lambda x: F.layer_norm(x, (8,), torch.ones_like(x[0]), torch.zeros_like(x[0])), FULL),
    "group norm": (lambda x: F.group_norm(x, 2), FULL),
    "softmax": (lambda x: x.softmax(-1), FULL),
    "softmax told": (lambda x: F.softmax(x, -1, dtype=LOW), LOW),
    "log softmax": (lambda x: F.log_softmax(x, -1), FULL),
    "power": (lambda x: x**2, FULL),
    "rsqrt": (lambda x: x.abs().rsqrt(), FULL),
    "sum": (lambda x: x.sum(-1), FULL),
    "mean": (lambda x: x.mean(-1), LOW),
    "gelu": (F.gelu, LOW),
    "linear": (lambda x: F.linear(x.float(), torch.ones_like(x)), LOW),
    "addition": (lambda x: x + x, LOW),
    "float64": (lambda x: x.double().softmax(-1), torch.float64),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.long, device=x.device)), FULL),
}


def dtype_of(call: Callable[[Tensor], Tensor], device: str = "cpu") -> torch.dtype:
    x = torch.ones(4, 8, dtype=LOW, device=device, requires_grad=True)
    result = call(x)
    result.sum().backward()
    assert x.grad is not None and x.grad.dtype == LOW
    return result.dtype


@pytest.mark.parametrize("name", CALLS)
def test_calls_give_the_dtypes_of_a_gpu(name: str) -> None:
    call, want = CALLS[name]
    with autocast_as("cuda", LOW):
        assert dtype_of(call) == want


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_gpu_agrees(name: str) -> None:
    call, want = CALLS[name]
    with torch.autocast("cuda", dtype=LOW):
        assert dtype_of(call, "cuda") == want


def test_modules_and_fake_tensors_follow_too() -> None:
    norm = nn.LayerNorm(8).to(LOW)
    with autocast_as("cuda", LOW), FakeTensorMode(allow_non_fake_inputs=True):
        result = norm(torch.empty(4, 8, dtype=LOW))
    assert result.dtype == FULL


def test_autocast_of_the_models_own_switches_it_off() -> None:
    with autocast_as("cuda", LOW), torch.autocast("cpu", enabled=False):
        assert torch.ones(4, 8, dtype=LOW).softmax(-1).dtype == LOW


def test_nothing_is_left_behind() -> None:
    with autocast_as("cuda", LOW):
        pass
    with autocast_as("cpu", LOW):
        assert torch.ones(4, 8, dtype=LOW).softmax(-1).dtype == LOW
    with autocast_as("cuda", FULL), autocast_as("cuda", None):
        assert not torch.is_autocast_enabled("cpu")
