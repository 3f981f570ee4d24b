"""CUDA's attention kernels by formula: which one torch takes, what it saves, what backward needs meanwhile.

Shapes are compared with torch's own rules for tensors without data (`torch/_meta_registrations.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compiler.capture.trace import trace
from penstock.graph.kernels.attention import (
    EFFICIENT,
    FLASH,
    MATH,
    cuda_attention,
    cuda_backend,
    cuda_packed_attention,
    cuda_window_attention,
)
from penstock.graph.kernels.call_rows import KernelCalls, MixRows
from penstock.graph.operators.table import kernel_rows
from penstock.ir.machine.call_mix import merge_rows
from penstock.passes.rewrite.drop_masks import DropMasks
from penstock.runtime.functions import packed_attention, window_attention
from penstock.tests.passes.running import apply, draft_of
from penstock.tests.passes.stage_runs import Peak, one_device, stages_of
from penstock.tests.shown_elsewhere import slow_but
from penstock.tests.zoo import zoo

BATCH, HEADS, ROWS, WIDTH = 2, 4, 100, 16
aten = torch.ops.aten


class Calls(TorchDispatchMode, KernelCalls):
    """Attention calls, of real kernels and of stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = MixRows()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for row in kernel_rows(func, args, kwargs or {}, out) or ():
            self.rows.add(row)
        return out

    def kernel(self, call: Any) -> None:
        self.rows.add(call)


def operand(dtype: torch.dtype = torch.bfloat16, rows: int = ROWS, width: int = WIDTH, heads: int = HEADS) -> Tensor:
    return torch.empty(BATCH, heads, rows, width, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("dtype", "width", "masked", "causal", "keys", "backend"),
    [
        (torch.bfloat16, 16, False, True, ROWS, FLASH),
        (torch.float16, 20, False, False, ROWS, FLASH),  # padded to 24
        (torch.float16, 256, False, False, ROWS, FLASH),
        (torch.float16, 512, False, False, ROWS, EFFICIENT),
        (torch.bfloat16, 16, True, False, ROWS, EFFICIENT),
        (torch.bfloat16, 20, True, False, ROWS, MATH),
        (torch.bfloat16, 16, False, True, ROWS + 1, EFFICIENT),  # flash attention aligns causal rows otherwise
        (torch.bfloat16, 16, False, False, ROWS + 1, FLASH),
        (torch.float32, 16, False, True, ROWS, EFFICIENT),
        (torch.float32, 18, False, True, ROWS, MATH),
        (torch.float64, 16, False, False, ROWS, MATH),
    ],
)
def test_backend(dtype: torch.dtype, width: int, masked: bool, causal: bool, keys: int, backend: str) -> None:
    query, key = operand(dtype, width=width), operand(dtype, keys, width)
    mask = torch.ones(ROWS, keys, dtype=torch.bool) if masked else None
    assert cuda_backend(query, key, key, mask, causal) == backend


def projected(dtype: torch.dtype, heads: int = HEADS, key_heads: int = HEADS) -> list[Tensor]:
    """Query, key and value in the layout of most models: heads inside of tokens."""
    counts = (heads, key_heads, key_heads)
    return [torch.zeros(BATCH, ROWS, n, WIDTH, dtype=dtype, requires_grad=True).transpose(1, 2) for n in counts]


def saved_bytes(call: Callable[..., Tensor], operands: list[Tensor], *more: Any, **options: Any) -> int:
    """Bytes that are saved beside the operands, by a call and by the product after it."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    weight = torch.zeros(operands[0].shape[1] * WIDTH, 8, dtype=operands[0].dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        found = call(*operands, *more, **options).transpose(1, 2).flatten(2) @ weight
    given = {t.untyped_storage()._cdata for t in (*operands, weight)}
    assert found.requires_grad
    return sum(size for key, size in saved.items() if key not in given)


def meta_bytes(kernel: Any, operands: list[Tensor], *more: Any) -> int:
    """Output and row sums by torch's rule for tensors without data."""
    on_meta = [torch.empty(t.transpose(1, 2).shape, dtype=t.dtype, device="meta").transpose(1, 2) for t in operands]
    return sum(t.untyped_storage().nbytes() for t in kernel(*on_meta, *more)[:2])


DRAWS = 24  # seed and offset


def test_flash_saves_output_and_row_sums() -> None:
    operands = projected(torch.bfloat16)
    want = BATCH * HEADS * ROWS * (2 * WIDTH + 4)
    assert saved_bytes(cuda_attention, operands, is_causal=True) == want + DRAWS
    assert meta_bytes(aten._scaled_dot_product_flash_attention, operands, 0.0, True) == want


def test_efficient_saves_its_mask_as_numbers() -> None:
    operands = projected(torch.bfloat16)
    mask = torch.ones(BATCH, 1, ROWS, ROWS, dtype=torch.bool)
    own = BATCH * HEADS * (ROWS * 2 * WIDTH + 128 * 4)  # rows are padded to 32
    numbers = BATCH * ROWS * 112 * 2  # columns are padded to 16
    assert saved_bytes(cuda_attention, operands, attn_mask=mask) == own + numbers + DRAWS
    assert meta_bytes(aten._scaled_dot_product_efficient_attention, operands, None, True) == own


def test_fp32_has_no_flash() -> None:
    operands = projected(torch.float32)
    own = BATCH * HEADS * (ROWS * 4 * WIDTH + 128 * 4)
    assert saved_bytes(cuda_attention, operands, is_causal=True) == own + DRAWS


def test_math_saves_all_scores() -> None:
    operands = projected(torch.float64)
    assert saved_bytes(cuda_attention, operands) >= BATCH * HEADS * ROWS * ROWS * 8


def test_a_window_saves_its_operands_alone() -> None:
    operands = projected(torch.bfloat16)
    output = BATCH * HEADS * ROWS * WIDTH * 2  # what the product saves
    assert saved_bytes(cuda_window_attention, operands, 31, 0) == output
    assert saved_bytes(window_attention, operands, 31, 0) == output


def backward_peak(operands: list[Tensor], **options: Any) -> int:
    out = cuda_attention(*operands, **options)
    dout = torch.zeros_like(out)
    with Peak() as peak:
        torch.autograd.grad(out, operands, dout)
    return peak.most


def test_backward_holds_a_gradient_in_fp32() -> None:
    rows, size = BATCH * HEADS * 128, BATCH * HEADS * ROWS * WIDTH
    assert backward_peak(projected(torch.bfloat16), is_causal=True) == 3 * 2 * size + rows * 4 * (1 + 32)
    blocks = BATCH * HEADS * 2  # of 64 queries, with a lock and counters of 16 bytes each
    sums = 4 * BATCH * HEADS * ROWS
    assert backward_peak(projected(torch.float32)) == 3 * 4 * size + sums + blocks * (4 * 64 * 64 + 16)


def test_backward_of_grouped_heads_holds_every_heads_gradient() -> None:
    operands = projected(torch.bfloat16, key_heads=2)
    rows, size = BATCH * HEADS * 128, BATCH * HEADS * ROWS * WIDTH
    want = 2 * 2 * size + rows * 4 * (1 + 32) + 2 * 2 * size
    assert backward_peak(operands, is_causal=True, enable_gqa=True) == want


def test_a_windows_calls_are_those_of_its_blocks() -> None:
    """On CUDA as on CPU: as many queries and keys as the blocks have."""
    length = 700
    operands = [torch.zeros(1, 2, length, WIDTH, requires_grad=True) for _ in range(3)]
    found = []
    for call in (cuda_window_attention, window_attention):
        with Calls() as calls:
            call(*operands, 200, 3).sum().backward()
        rows = merge_rows((row, 1) for row in calls.rows.attention)
        found.append({(row.queries, row.keys, row.backward, row.count) for row in rows})
    assert found[0] == found[1]


def test_documents_save_their_operands_alone_and_call_by_blocks() -> None:
    operands = projected(torch.bfloat16)
    documents = torch.zeros(BATCH, ROWS, dtype=torch.long)
    output = BATCH * HEADS * ROWS * WIDTH * 2  # what the product saves
    for call in (cuda_packed_attention, packed_attention):
        assert saved_bytes(call, operands, documents) == output + BATCH * ROWS * 8
    operands = [torch.zeros(1, 2, 1100, WIDTH, requires_grad=True) for _ in range(3)]
    found = []
    for call in (cuda_packed_attention, packed_attention):
        with Calls() as calls:
            call(*operands, torch.zeros(1, 1100, dtype=torch.long)).sum().backward()
        rows = merge_rows((row, 1) for row in calls.rows.attention)
        found.append({(row.queries, row.keys, row.backward, row.count) for row in rows})
    assert found[0] == found[1]
    assert {(queries, keys) for queries, keys, _, _ in found[0]} == {(512, 512), (512, 1024), (76, 1100)}


@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_borders_let_documents_run_the_kernel(key_heads: int) -> None:
    """Backward has room for each document's sums and gradients, as `tests/gpu/test_gpu_workspace.py` measures."""
    operands, most = projected(torch.bfloat16, key_heads=key_heads), 5
    documents, borders = torch.zeros(BATCH, ROWS, dtype=torch.long), torch.zeros(most + 1, dtype=torch.int32)
    size = BATCH * HEADS * ROWS
    saved = saved_bytes(cuda_packed_attention, operands, documents, borders=borders)
    assert saved == size * (2 * WIDTH + 4) + (most + 1) * 4 + 16  # output, row sums, borders, where draws would begin
    out = cuda_packed_attention(*operands, documents, borders=borders)
    dout = torch.zeros_like(out)
    with Peak() as peak:
        torch.autograd.grad(out, operands, dout)
    padded = HEADS * (BATCH * ROWS + 128 * most)
    gradients = sum(t.numel() * 2 for t in operands)
    expanded = 2 * 2 * size * WIDTH if key_heads != HEADS else 0
    assert peak.most == gradients + padded * 4 * (1 + 32) + expanded
    with Calls() as calls:
        cuda_packed_attention(*operands, documents, borders=borders).sum().backward()
    rows = merge_rows((row, 1) for row in calls.rows.attention)
    assert {(row.backend, row.heads, row.queries, row.keys, row.causal, row.backward) for row in rows} == {
        (FLASH, BATCH * HEADS, ROWS, ROWS, True, backward) for backward in (False, True)
    }
    with Calls() as calls:  # dropout, and other dtypes, run in blocks
        cuda_packed_attention(*operands, documents, 0.1, borders=borders)
    assert FLASH not in {row.backend for row in calls.rows.attention}


@pytest.mark.parametrize("name", slow_but(("gpt2",), ["mistral", "gpt2"]))
def test_saved_bytes_of_a_real_stage_without_masks(name: str) -> None:
    """On CPU: a window in blocks, and causal attention without a mask."""
    model, batch = zoo()[name](dropout=0.0)
    batch = {key: value for key, value in batch.items() if key != "attention_mask"}
    draft = apply(draft_of(trace(model, batch)), DropMasks())
    for spec, runner, inputs in stages_of(one_device(draft.graph, 2), batch):
        runner.forward(inputs, 0)
        assert spec.kept_bytes == runner.kept_bytes, spec.title
