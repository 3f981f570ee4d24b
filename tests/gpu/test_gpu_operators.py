"""Operators in the precisions of plans, on a GPU, against the CPU in fp32: also whether an emulated GPU has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.gpu
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # two steps of the last bit


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_layer_norm_and_its_backward(dtype: torch.dtype, weighted: bool) -> None:
    """Its mean and its deviation are fp32 on a GPU, and so is the computation."""
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=made).to(dtype) for shape in ((4, 5, 8), (8,), (8,))]
    grad = torch.randn(4, 5, 8, generator=made).to(dtype)

    def run(device: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [value.to(device, dtype).requires_grad_() for value in (given if weighted else given[:1])]
        out = F.layer_norm(leaves[0], (8,), *leaves[1:])
        out.backward(grad.to(device, dtype))
        return [out, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    for found, wanted in zip(run("cuda", dtype), run("cpu", torch.float32), strict=True):
        assert found.dtype == dtype
        scale = float(wanted.abs().max())  # gradients of weights are sums over 20 rows
        torch.testing.assert_close(found.cpu().float(), wanted, rtol=0.0, atol=ROUNDING[dtype] * scale)
    _, mean, deviation = torch.ops.aten.native_layer_norm(given[0].cuda(), [8], None, None, 1e-5)
    assert mean.dtype == deviation.dtype == torch.float32 and mean.shape == deviation.shape == (4, 5, 1)
