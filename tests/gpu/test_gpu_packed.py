"""Packed documents on a GPU: as eager PyTorch with a mask of all pairs, without one, and without a wait of the host."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import penstock
from penstock.bench.peers import parity
from penstock.graph.masks.forms import DocumentBorders
from penstock.ir.errors import BatchError
from penstock.runtime import functions
from penstock.runtime.functions import document_borders, packed_attention
from penstock.runtime.functions.document_borders import attend_in_borders
from penstock.tests.compiler.job.test_packed_job import flattened
from penstock.tests.gpu.rehearsal import DEVICE, compile_job, exact, needs_documents, on_gpu, only_on_gpu
from penstock.tests.zoo import VOCABULARY, without_cache, zoo

__all__ = ["exact"]  # a fixture
pytestmark = [*on_gpu, needs_documents]
LENGTH = 1024  # the shortest rows without a mask
AGAIN = (
    "drop-masks, coarsen, partition-balanced{stages=2}, map-round-robin, schedule-pipeline, "
    "insert-remat{always=true}, insert-fetch, insert-optimizer"
)
SGD = partial(torch.optim.SGD, lr=0.05)


def packed_batches(times: int = 8) -> list[dict[str, Tensor]]:
    """Two rows each, of so many times 128 tokens, with borders at other places in each step."""
    found = []
    for seed, cuts in enumerate([(37, 5, 86, 128), (128, 64, 64), (124, 1, 127, 3)]):
        generator = torch.Generator().manual_seed(seed)
        documents = [torch.randint(3, VOCABULARY, (length * times,), generator=generator) for length in cuts]
        found.append(penstock.pack_documents(documents, 128 * times).columns)
    return found


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.emulated_core), "fp16"])
def test_losses_and_weights_are_eagers(precision: str) -> None:
    model, data = without_cache(zoo()["llama"](dropout=0.0)[0]), packed_batches()
    wanted = parity.train_eager(model, data, DEVICE, precision, micro_batches=1)
    with compile_job(model, data[0], strategy="balanced", micro_batches=1, precision=precision) as job:
        form = "documents" if precision == "fp32" else DocumentBorders(most=2 * 17, positions="position_ids")
        assert set(job.plan.decisions.masks.values()) == ({form} if DEVICE == "cuda" else set())
        found = parity.train_job(job, data)
    apart = parity.compare(found, wanted, parity.start_of(model))
    assert apart.fits(precision), apart


@only_on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [0, 40])
def test_the_host_waits_for_nothing(dtype: torch.dtype, most: int) -> None:
    """In blocks, and in bf16 with borders by the kernel, of which some documents are empty."""
    q, k, v = (torch.randn(2, 2, LENGTH, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    documents = (torch.rand(2, LENGTH, device="cuda") < 0.01).cumsum(-1)
    mask = (documents[:, None, :, None] == documents[:, None, None]).tril()
    wanted = F.scaled_dot_product_attention(q, k, v, mask)
    dout = torch.randn_like(wanted)
    gradients = torch.autograd.grad(wanted, (q, k, v), dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        borders = document_borders(documents, most) if most else None
        found = packed_attention(q, k, v, documents, borders=borders)
        again = torch.autograd.grad(found, (q, k, v), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # In fp32 sums of up to 1024 terms of order one in another order; in bf16 one unit in the last of 8 bits, or two.
    tolerance = 2e-5 if dtype == torch.float32 else 2**-7
    for one, other in zip((found, *again), (wanted, *gradients)):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=2 * tolerance)


@only_on_gpu
@pytest.mark.emulated_core
def test_the_kernel_runs_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """On operands of its dtypes and sizes, with as many heads of keys as of queries or fewer, and nowhere else."""
    ran: list[Tensor] = []
    made = document_borders(torch.zeros(2, 64, dtype=torch.long, device="cuda"), 2)

    def count(*args: Any) -> Tensor:
        ran.append(args[0])
        return attend_in_borders(*args)

    monkeypatch.setattr(functions, "attend_in_borders", count)
    documents = torch.zeros(2, 64, dtype=torch.long, device="cuda")
    for dtype, key_heads, width, dropout, runs in (
        (torch.bfloat16, 4, 16, 0.0, True),
        (torch.float16, 2, 64, 0.0, True),
        (torch.float32, 4, 16, 0.0, False),
        (torch.bfloat16, 4, 20, 0.0, False),
        (torch.bfloat16, 4, 256, 0.0, False),
        (torch.bfloat16, 4, 16, 0.1, False),
    ):
        ran.clear()
        q, k, v = (torch.randn(2, n, 64, width, device="cuda", dtype=dtype) for n in (4, key_heads, key_heads))
        is_grouped = key_heads < 4
        found = packed_attention(q, k, v, documents, dropout, enable_gqa=is_grouped, borders=made)
        assert bool(ran) == runs
        if not dropout:
            wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=2**-6)


@only_on_gpu
@pytest.mark.parametrize("extra", ["", "rematerialised", "graphs"])
def test_packed_training_is_that_of_each_document_by_itself(extra: str) -> None:
    """Losses of three steps as of documents that run one by one, without a mask or a kernel for packed rows."""
    model, data = without_cache(zoo()["llama"](dropout=0.0)[0]), packed_batches(times=1)
    options: dict[str, Any] = {"strategy": AGAIN if extra == "rematerialised" else "balanced"}
    alone, start = copy.deepcopy(model).to(DEVICE), {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = SGD(alone.parameters())
    graphs = {"cuda_graphs": True} if extra == "graphs" else {}
    with compile_job(model, data[0], micro_batches=1, precision="bf16", optimizer=SGD, **options, **graphs) as job:
        assert {type(form) for form in job.plan.decisions.masks.values()} == {DocumentBorders}
        for batch in data:
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = one_by_one(alone, batch)
            # Other kernels round to 8 bits in another order; the loss is a mean over 250 tokens.
            assert float(job.step(batch)) == pytest.approx(float(loss.detach()), rel=2**-10)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        job.sync()
    for (name, mine), theirs in zip(model.named_parameters(), alone.parameters()):
        found, wanted = mine.detach().cpu() - start[name], theirs.detach().cpu() - start[name]
        assert float((found - wanted).norm()) < 0.05 * float(wanted.norm()), name  # gradients of 8 bits, added up


def one_by_one(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over all targets, of documents that run one by one."""
    total, count = torch.zeros((), device=DEVICE), 0
    for ids, positions, labels in zip(*(batch[name] for name in ("input_ids", "position_ids", "labels"))):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in itertools.pairwise(starts):
            targets = labels[start + 1 : end].to(DEVICE)
            if len(targets) and bool((targets != -100).any()):
                logits = model(input_ids=ids[None, start:end].to(DEVICE)).logits[0, :-1].float()
                total = total + F.cross_entropy(logits, targets, reduction="sum")
                count += len(targets)
    return total / count


@only_on_gpu
def test_a_batch_that_fills_a_row_with_documents_is_refused() -> None:
    model, data = without_cache(zoo()["llama"](dropout=0.0)[0]), packed_batches(times=1)
    crowded = {**data[0], "position_ids": data[0]["position_ids"] % 2}  # 64 in each row
    with compile_job(model, data[0], strategy="balanced", micro_batches=1, precision="bf16") as job:
        with pytest.raises(BatchError, match=r"documents in micro-batch 0, .*the plan has room for 16\."):
            job.step(crowded)
        job.step(data[0])


@only_on_gpu
def test_any_number_of_tokens() -> None:
    """One plan for rows of different lengths has room for the documents of the longest."""
    model = without_cache(zoo()["llama"](dropout=0.0)[0])
    alone = copy.deepcopy(model).to(DEVICE)
    still = partial(torch.optim.SGD, lr=0.0)
    tokens = torch.export.Dim("tokens", max=160)
    given = {"micro_batches": 1, "precision": "bf16", "optimizer": still, "dynamic_shapes": tokens}
    with compile_job(model, flattened((30, 50)), strategy="balanced", **given) as job:
        assert set(job.plan.decisions.masks.values()) == {DocumentBorders(most=8, positions="position_ids")}
        for seed, lengths in enumerate([(30, 50), (90, 20, 2, 40), (2,), (10,) * 8]):
            batch = flattened(lengths, seed)
            with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
                wanted = one_by_one(alone, batch)
            assert float(job.step(batch)) == pytest.approx(float(wanted), rel=2**-8)  # of few tokens, of 8 bits
        with pytest.raises(BatchError, match="holds 9 documents in micro-batch 0"):
            job.step(flattened((3,) * 9))
