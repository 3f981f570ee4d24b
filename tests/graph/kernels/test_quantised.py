"""Products of quantised weights as CUDA has them: what they hold, and where weights are unpacked, is counted."""

from __future__ import annotations

import bitsandbytes
import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.blocks import BlockCost
from penstock.graph.costs.block import measure
from penstock.graph.kernels.quantised import OUTLIERS
from penstock.graph.layers import find_blocks
from penstock.runtime.quantised.linear_4bit import FUSED_ROWS
from penstock.runtime.quantised.model import with_bytes

ROWS, WIDTH, OUT = 512, 64, 512


class Small(nn.Module):
    def __init__(self, threshold: float):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = bitsandbytes.nn.Linear8bitLt(WIDTH, OUT, False, has_fp16_weights=False, threshold=threshold)
        self.head.requires_grad_(False).to("cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale).sum()


def cost(threshold: float, device_kind: str, rows: int = ROWS) -> BlockCost:
    """Of the product's own block, on fp32 inputs."""
    graph = trace(with_bytes(nn.Sequential(Small(threshold))), {"input": torch.randn(rows, WIDTH)})
    block = next(b for b in find_blocks(graph, "operator") if "head" in b.name)
    return measure(graph, block, device_kind)


def peak_bytes(threshold: float, device_kind: str) -> int:
    return cost(threshold, device_kind).forward_peak_bytes


def test_forward_on_cuda_multiplies_packed_weights_and_backward_unpacks_them() -> None:
    cuda, cpu = (cost(0.0, kind, rows=2) for kind in ("cuda", "cpu"))
    unpacked_bytes = WIDTH * OUT * 4
    assert cuda.forward_traffic_bytes < unpacked_bytes < cpu.forward_traffic_bytes
    assert unpacked_bytes < cuda.backward_traffic_bytes == cpu.backward_traffic_bytes
    assert cuda.forward_flops == cuda.backward_flops == cpu.forward_flops == 2 * 2 * WIDTH * OUT
    assert cuda.unpacked is None and cpu.unpacked is not None


def test_buffers_are_counted_on_cuda() -> None:
    product = ROWS * OUT * (4 + 2 + 4)  # int32, as the kernel unpacks it, and in the input's type
    columns = round(OUTLIERS * WIDTH) * 4
    assert peak_bytes(0.0, "cuda") == ROWS * WIDTH + product
    assert peak_bytes(6.0, "cuda") == ROWS * WIDTH + product + columns * (ROWS + OUT)
    assert peak_bytes(6.0, "cpu") == ROWS * OUT * 4 + WIDTH * OUT * 4  # the result, and the unpacked weight


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = bitsandbytes.nn.Linear4bit(WIDTH, OUT, False, quant_type="nf4", compress_statistics=False)
        self.head.requires_grad_(False).to("cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale).sum()


@pytest.mark.parametrize("rows", [FUSED_ROWS, FUSED_ROWS + 1])
def test_a_product_that_may_be_fused_is_one_call_that_nothing_keeps(rows: int) -> None:
    """On CUDA the library's call shows no product of matrices that a class of saved tensors could name."""
    graph = trace(with_bytes(nn.Sequential(Packed())), {"input": torch.randn(rows, WIDTH)})
    block = next(b for b in find_blocks(graph, "operator") if "head" in b.name)
    cuda, cpu = measure(graph, block, "cuda"), measure(graph, block, "cpu")
    assert len(cpu.calls or ()) == 1 and len(cuda.calls or ()) == (rows > FUSED_ROWS)
    assert (cuda.unpacked is not None) == (rows > FUSED_ROWS)
    assert cuda.forward_flops == cpu.forward_flops == 2 * rows * WIDTH * OUT
    assert cuda.kept_bytes == cpu.kept_bytes and cuda.forward_peak_bytes == cpu.forward_peak_bytes
