"""The functions on packed bytes against the layers of their libraries, and what they keep for backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from torchao.quantization import Float8WeightOnlyConfig, quantize_

from penstock.runtime.quantised.model import is_quantised, names_of_bytes, with_bytes


def nf4(width: int, bias: bool, **options: object) -> nn.Module:
    layer = bitsandbytes.nn.Linear4bit(width, 96, bias=bias, compute_dtype=torch.float32, **options)
    return nn.Sequential(layer.requires_grad_(False)).to("cpu")


def int8(width: int, bias: bool) -> nn.Module:
    layer = bitsandbytes.nn.Linear8bitLt(width, 96, bias=bias, has_fp16_weights=False, threshold=6.0)
    return nn.Sequential(layer.requires_grad_(False)).to("cpu")


def float8(width: int, bias: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, 96, bias=bias)).requires_grad_(False)
    quantize_(model, Float8WeightOnlyConfig())
    return model


LAYERS: dict[str, Callable[[int, bool], nn.Module]] = {
    "nf4": lambda width, bias: nf4(width, bias, quant_type="nf4", compress_statistics=False),
    "nf4-double": lambda width, bias: nf4(width, bias, quant_type="nf4"),
    "fp4": lambda width, bias: nf4(width, bias, quant_type="fp4"),
    "int8": int8,
    "float8": float8,
}


def outcome(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    given = x.clone().requires_grad_()
    found = model(given)
    (found * torch.arange(found.shape[-1])).sum().backward()
    assert given.grad is not None
    return found.detach(), given.grad


def of_width(kind: str, width: int) -> Any:
    """A case; in 4 bits an odd width is slow, as the library then compiles its functions."""
    return pytest.param(kind, width, marks=[pytest.mark.slow] * (width == 65 and kind in ("nf4", "nf4-double", "fp4")))


@pytest.mark.parametrize(("kind", "width"), [of_width(kind, width) for width in (128, 65) for kind in LAYERS])
@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_the_librarys(kind: str, width: int, bias: bool) -> None:
    torch.manual_seed(0)
    model = LAYERS[kind](width, bias)
    own = with_bytes(model)
    assert is_quantised(model) and not is_quantised(own) and names_of_bytes(own)
    assert with_bytes(own) is own
    x = torch.randn(3, 5, width)
    for ours, theirs in zip(outcome(own, x), outcome(model, x)):
        if kind == "float8":  # the library multiplies in another order
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", LAYERS)
def test_only_bytes_are_kept_for_backward(kind: str) -> None:
    own = with_bytes(LAYERS[kind](128, True))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        found = own(torch.randn(4, 128, requires_grad=True))
    assert kept and {tensor.dtype for tensor in kept} == {torch.uint8}
    whole_bytes = 4 * 96 * 128
    assert sum(tensor.nbytes for tensor in kept) < 0.3 * whole_bytes
    found.sum().backward()


@pytest.mark.parametrize("kind", LAYERS)
def test_flops_are_those_of_the_products(kind: str) -> None:
    own = with_bytes(LAYERS[kind](128, False))
    with FlopCounterMode(display=False) as counted:
        own(torch.randn(4, 128, requires_grad=True)).sum().backward()
    assert counted.get_total_flops() == 2 * (2 * 4 * 96 * 128)


def test_bytes_that_begin_between_elements() -> None:
    """As where a shard of many small tensors has them."""
    from penstock.runtime.quantised.raw_bytes import as_bytes, tensor_from_bytes

    values = torch.randn(7)
    moved = torch.cat([torch.zeros(3, dtype=torch.uint8), as_bytes(values)])[3:]
    assert torch.equal(tensor_from_bytes(moved, torch.float32), values)


@pytest.mark.slow
def test_the_libraries_are_imported_only_when_used() -> None:
    code = (
        "import sys, torch, penstock.runtime.functions, penstock.runtime.processes.worker\n"
        "from penstock.runtime.quantised.model import with_bytes\n"
        "with_bytes(torch.nn.Linear(2, 2))\n"
        "print([name for name in ('bitsandbytes', 'torchao', 'penstock.compiler') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
