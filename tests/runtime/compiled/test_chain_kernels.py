"""Kernels of chains are tried before they run: the same results, or a reason by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.ir.precision import Precision
from penstock.runtime.compiled import chain_kernels
from penstock.runtime.compiled.chain_kernels import make_kernels
from penstock.runtime.functions import fuse
from penstock.runtime.functions.chains import KERNELS, Chain
from penstock.runtime.torch_names import FakeTensorMode

CPU, FP32 = torch.device("cpu"), Precision.of("fp32")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    KERNELS.clear()
    yield
    KERNELS.clear()


def gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def turn(x: Tensor, cos: Tensor) -> Tensor:
    return x * cos - x[..., :1] * cos


def run_on_fakes() -> None:
    with FakeTensorMode():
        x, y = (torch.empty(4, 8, requires_grad=True) for _ in range(2))
        fuse(gate, [x, y], [0, 1])
        fuse(turn, [x, torch.empty(8)], [1])


def step() -> list[Tensor]:
    x, y = (torch.linspace(-2, 2, 32).view(4, 8).requires_grad_() for _ in range(2))
    made = fuse(gate, [x, y], [0, 1]) + fuse(turn, [x, torch.linspace(0, 1, 8)], [1])
    made.square().sum().backward()
    assert x.grad is not None and y.grad is not None
    return [made, x.grad, y.grad]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_kernels_run_forward_and_backward(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = step()
    assert make_kernels(run_on_fakes, CPU, FP32, backend) == {} and len(KERNELS) == 2
    monkeypatch.setattr(Chain, "run", None)  # nothing runs as written any more
    torch.testing.assert_close(step(), written)


def test_other_layouts_and_other_wishes_run_as_written() -> None:
    make_kernels(run_on_fakes, CPU, FP32, "aot_eager")
    frozen = torch.linspace(-2, 2, 32).view(4, 8)
    trained = frozen.clone().requires_grad_()
    result = fuse(gate, [frozen, trained], [0, 1])  # of which one gradient is wanted
    result.backward(torch.ones(8, 4).t())  # and of another layout
    torch.testing.assert_close(trained.grad, F.silu(frozen))
    x, y = (frozen.clone().requires_grad_() for _ in range(2))
    fuse(gate, [x, y], [0, 1]).backward(torch.ones(8, 4).t())
    torch.testing.assert_close(y.grad, F.silu(frozen))
    torch.testing.assert_close(fuse(gate, [frozen.t(), frozen.t()], [0, 1]), gate(frozen.t(), frozen.t()))


def backend_of(change: Any) -> Any:
    def lookup(name: str) -> Any:
        return lambda graph, inputs: lambda *given: [change(each) for each in graph(*given)]

    return lookup


def fail(tensor: Tensor) -> Tensor:
    raise RuntimeError("no such instruction\nmore")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t * 1.01, "outputs differ from those as written by more than 0.0001 of the largest value"),
        (fail, "inductor failed: RuntimeError: no such instruction"),
    ],
)
def test_a_kernel_that_is_wrong_is_named_and_not_used(
    change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = step()
    monkeypatch.setattr("penstock.runtime.torch_names.lookup_backend", backend_of(change), raising=False)
    found = make_kernels(run_on_fakes, CPU, FP32, "inductor")
    assert all(reason in text for text in found.values()) and "gate's gate(gate, up)" in found
    assert all(map(torch.equal, step(), written))


def test_without_triton_chains_run_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_kernels, "lacks_triton", lambda device, backend: True)
    found = make_kernels(run_on_fakes, CPU, FP32, "inductor")
    assert found == {"every chain of calls": "Python has no Triton"} and not KERNELS
