"""Stand-ins of kernels, by which costs are measured: what models do with a kernel's result, they may do with these."""

from __future__ import annotations

import pytest
import torch

from penstock.graph.kernels.stand_ins import grouped_product


@pytest.mark.parametrize("width", [8, 6], ids=["whole rows", "padded rows"])
def test_a_grouped_product_may_be_changed_in_place(width: int) -> None:
    """As gpt-oss adds its experts' biases. Rows begin at multiples of 16 bytes."""
    a, b = torch.ones(4, 8, requires_grad=True), torch.ones(2, 8, width, requires_grad=True)
    out = grouped_product(a, b, torch.tensor([1, 4], dtype=torch.int32))
    assert out.stride() == (8, 1) and out.shape == (4, width)
    out += 1.0
    out.sum().backward()
    assert a.grad is not None and a.grad.shape == a.shape and b.grad is not None and b.grad.shape == b.shape
