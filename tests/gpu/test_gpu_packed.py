"""Packed documents on a GPU: as eager PyTorch with a mask of all pairs, without one, and without a wait of the host."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import penstock
from penstock.bench.peers import parity
from penstock.runtime.functions import packed_attention
from penstock.tests.gpu.rehearsal import DEVICE, compiled, exact, on_gpu, only_on_gpu
from penstock.tests.zoo import VOCABULARY, without_cache, zoo

__all__ = ["exact"]  # a fixture
pytestmark = on_gpu
LENGTH = 1024  # the shortest rows without a mask


def packed_batches() -> list[dict[str, Tensor]]:
    """Two rows each, with borders at other places in each step."""
    found = []
    for seed, cuts in enumerate([(300, 40, 684, 1024), (1024, 512, 512), (1000, 1, 1023, 23)]):
        generator = torch.Generator().manual_seed(seed)
        documents = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in cuts]
        found.append(penstock.pack_documents(documents, LENGTH).columns)
    return found


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.emulated_core), "fp16"])
def test_losses_and_weights_are_eagers(precision: str) -> None:
    model, data = without_cache(zoo()["llama"](dropout=0.0)[0]), packed_batches()
    wanted = parity.train_eager(model, data, DEVICE, precision, micro_batches=1)
    with compiled(model, data[0], strategy="balanced", micro_batches=1, precision=precision) as job:
        assert set(job.plan.decisions.masks.values()) == ({"documents"} if DEVICE == "cuda" else set())
        found = parity.train_job(job, data)
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.within(precision), apart


@only_on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_waits_for_nothing(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 2, LENGTH, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    documents = (torch.rand(2, LENGTH, device="cuda") < 0.01).cumsum(-1)
    mask = (documents[:, None, :, None] == documents[:, None, None]).tril()
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    dout = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = packed_attention(q, k, v, documents)
        again = torch.autograd.grad(found, (q, k, v), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # In fp32 sums of up to 1024 terms of order one in another order; in bf16 one unit in the last of 8 bits, or two.
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    for one, other in zip((found, *again), (wanted, *gradients)):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=2 * tolerance)
