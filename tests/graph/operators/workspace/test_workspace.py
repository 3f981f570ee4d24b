"""What CUDA's operators hold while they run, by hand from the sizes that torch's sources name.

`tests/gpu/test_gpu_workspace.py` compares the rules with what torch's code allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.costs import block as costs
from penstock.graph.operators.record import LARGEST, GpuSize
from penstock.graph.operators.table import workspace_bytes
from penstock.graph.operators.workspace import attention
from penstock.ir.machine.hardware import Hardware
from penstock.passes.rewrite import coarsen as coarsen_pass
from penstock.passes.rewrite.coarsen import Coarsen
from penstock.tests.passes.running import apply, draft_of
from penstock.tests.shown_elsewhere import slow_rows_but

CARD = GpuSize(128, 1536)  # an RTX 4090
BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def hold_back(operator: Any, *arguments: Any, gpu: GpuSize = CARD) -> int | None:
    return workspace_bytes(operator, arguments, {}, operator(*arguments), gpu)


def test_of_what_has_no_rule_nothing_is_known_and_views_and_pointwise_calls_hold_nothing() -> None:
    assert hold_back(aten.kthvalue.default, meta(8, 8), 1) is None
    for operator, *given in (
        (aten.mul.Tensor, meta(8), meta(8)), (aten.add_.Tensor, meta(8), meta(8)), (aten.split.Tensor, meta(8), 4),
        (aten.transpose.int, meta(8, 8), 0, 1), (aten.copy_.default, meta(8), meta(8)),
    ):  # fmt: skip
        assert hold_back(operator, *given) == 0, operator


class Second(nn.Module):
    """The second smallest of each row, for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).kthvalue(2).values.square().mean()


@pytest.mark.parametrize("machine", ["rtx4090x1", "cpu"])
def test_what_is_not_counted_is_told(machine: str) -> None:
    hardware = Hardware.from_any(machine) if machine != "cpu" else Hardware.cpu(num_devices=1)
    draft, coarsen = draft_of(trace(Second(), {"x": torch.ones(4, 8)}), hardware), Coarsen()
    coarsen.rewrite(draft, coarsen.plan(draft))
    told = {"coarsen": "peaks leave out what kthvalue may hold on a GPU while they run"}
    assert draft.notes == ({} if machine == "cpu" else told)


class Several(Second):
    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.stack([x.kthvalue(k).values for k in range(1, 6)]).square().mean()


def test_one_call_of_a_line_is_asked_what_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in hundreds of parts has a call for each, alike but for its numbers."""
    asked: list[str] = []
    monkeypatch.setattr(coarsen_pass, "unknown_call", lambda graph, node: asked.append(str(node.target)) or "")
    draft, coarsen = draft_of(trace(Several(), {"x": torch.ones(4, 8)}), Hardware.from_any("rtx4090x1")), Coarsen()
    coarsen.rewrite(draft, coarsen.plan(draft))
    assert asked.count("kthvalue") == 1


def test_a_sum_over_rows_leaves_a_part_for_each_block_of_threads() -> None:
    """Blocks of 32 by 4 threads, 4 columns for a thread: 8 blocks span 1024 columns. A thread's 1024 of 4096 rows are
    16 for each of 64 blocks; each block has a part for 32 x 4 columns of every column, and each 8th a counter."""
    value = meta(4096, 1024)
    assert hold_back(aten.sum.dim_IntList, value, [0]) == 4 * 1024 * 64 * (32 * 4) + 4 * 8
    assert hold_back(aten.sum.dim_IntList, value.float(), [0]) == 4 * 1024 * 64 * (32 * 4) + 4 * 8
    assert hold_back(aten.var_mean.correction, value, [0]) == 16 * 1024 * 64 * (32 * 4) + 4 * 8


def test_many_rows_fill_the_gpu_once() -> None:
    """12 blocks of 128 threads on each of 128 processors, 32 of which span 4096 columns."""
    blocks = 12 * 128 // 32
    assert hold_back(aten.sum.dim_IntList, meta(16384, 4096), [0]) == 4 * 4096 * blocks * (32 * 4) + 4 * 32
    larger = 16 * 132 // 32
    assert hold_back(aten.sum.dim_IntList, meta(16384, 4096), [0], gpu=LARGEST) == 4 * 4096 * larger * (32 * 4) + 4 * 32


def test_columns_that_fill_the_gpu_share_out_rows_and_more_columns_do_not() -> None:
    """`grid <= target_grid_size` in Reduce.cuh: a thread's 512 of 2048 rows are 256 for each of two blocks."""
    filling = 12 * 128
    columns, parts = filling * 128, 2 * (32 * 4)
    assert hold_back(aten.sum.dim_IntList, meta(2048, columns), [0]) == 4 * columns * parts + 4 * filling
    assert hold_back(aten.sum.dim_IntList, meta(2048, columns + 128), [0]) == 0


@pytest.mark.parametrize(("shape", "dims"), [((300, 768), [0]), ((4096, 1024), [1]), ((0, 8), [0]), ((), [])])
def test_few_rows_and_columns_leave_nothing(shape: Sequence[int], dims: list[int]) -> None:
    assert hold_back(aten.sum.dim_IntList, meta(*shape), dims) == 0


def test_leading_dimensions_are_rows_too() -> None:
    whole = hold_back(aten.sum.dim_IntList, meta(8 * 512, 1024), [0])
    assert hold_back(aten.sum.dim_IntList, meta(8, 512, 1024), [0, 1]) == whole > 0


def test_a_table_of_embeddings_adds_up_ten_rows_at_a_time_in_fp32() -> None:
    parts = 16384 // 10 + 16384
    want = 8 * (2 + 1 + 2) * 16384 + 8 * parts + 4 * parts * 1024
    grad, indices = meta(16384, 1024), meta(16384, dtype=INT64)
    assert hold_back(aten.embedding_dense_backward.default, grad, indices, 32000, -1, False) == want
    grad, indices = meta(3072, 1024), meta(3072, dtype=INT64)
    assert hold_back(aten.embedding_dense_backward.default, grad, indices, 32000, -1, False) == 0


def test_a_small_table_has_no_more_sums_than_rows() -> None:
    parts = 4096 // 10 + 1000
    want = 8 * (2 + 1) * 4096 + 8 * 2 * 1000 + 8 * parts + 4 * parts * 256
    grad, indices = meta(4096, 256), meta(4096, dtype=INT64)
    assert hold_back(aten.embedding_dense_backward.default, grad, indices, 1000, -1, False) == want


def test_additions_at_indices_sort_them() -> None:
    table, rows, indices = meta(1000, 64), meta(512, 64), meta(512, dtype=INT64)
    assert hold_back(aten.index_put.default, table, [indices], rows, True) == 6 * 8 * 512 + 64 * 1024
    assert hold_back(aten.index_put.default, table, [indices], rows, False) == 0


def test_the_backward_of_a_norm_of_many_short_rows_adds_up_parts() -> None:
    """4096 parts of 32 rows, for weight and bias each; then a sum over them of 2 blocks of columns by 64."""

    def backward(rows: int) -> int:
        value, each, weight = meta(rows, 256), meta(rows, 1, dtype=FP32), meta(256)
        flags = [True, True, True]
        return hold_back(
            aten.native_layer_norm_backward.default, value, value, [256], each, each, weight, weight, flags
        )

    assert backward(131072) == 2 * 4096 * 256 * 2 + 4 * 256 * 64 * (32 * 4) + 4 * 2
    assert backward(65536) == 0


def test_the_backward_of_a_softmax_holds_a_product() -> None:
    value = meta(8, 100, 100, dtype=FP32)
    assert hold_back(aten._softmax_backward_data.default, value, value, -1, FP32) == value.nbytes


def test_a_product_copies_what_cublas_cannot_read() -> None:
    left, right = meta(64, 64), meta(64, 64)
    assert hold_back(aten.mm.default, left.t(), right.t()) == 0
    assert hold_back(aten.mm.default, meta(64, 128)[:, ::2], right) == left.nbytes
    assert hold_back(aten.addmm.default, meta(64), meta(64, 128)[:, ::2], right) == left.nbytes


def test_a_convolution_copies_tensors_into_the_layout_of_its_kernels() -> None:
    value, weight = meta(2, 16, 32, 32), meta(8, 16, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    out = meta(2, 8, 32, 32)
    assert (
        hold_back(aten.convolution.default, value, weight, None, *options) == value.nbytes + weight.nbytes + out.nbytes
    )
    last = [t.to(memory_format=torch.channels_last) for t in (value, weight, out)]
    assert hold_back(aten.convolution.default, last[0], last[1], None, *options) == 0
    flags = [True, True, False]
    given = hold_back(aten.convolution_backward.default, out, value, weight, [8], *options, flags)
    assert given == value.nbytes + weight.nbytes + out.nbytes + 4 * weight.numel()
    given = hold_back(aten.convolution_backward.default, last[2], last[0], last[1], [8], *options, flags)
    assert given == 4 * weight.numel()


def test_sorts_have_copies_of_keys_and_places() -> None:
    assert hold_back(aten.sort.default, meta(512, 1024)) == 8 * 1024
    assert hold_back(aten.sort.default, meta(100000, dtype=INT64)) == (8 + 8 + 8) * 100000 + 50000 + 128 * 1024
    assert hold_back(aten.topk.default, meta(1000, 64), 8) == 0
    assert hold_back(aten.topk.default, meta(16384, 1024), 8) == 16384 * (1024 + 32 + 536) + 4096


def test_scans_copy_what_does_not_lie_in_rows_and_have_states_of_tiles() -> None:
    value = meta(64, 128)
    for scan in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default):
        assert hold_back(scan, value, 1) == 0, scan
        assert hold_back(scan, value.t(), 1) == value.nbytes, scan
        assert hold_back(scan, meta(1 << 20), 0) == 16 * 512 + 4096, scan
    assert hold_back(aten.cumsum.default, meta(64, 128, dtype=torch.bool), 0) == 8 * 64 * 128
    assert hold_back(aten.cumsum.default, meta(64, 128, dtype=torch.bool).t(), 0) == 2 * 8 * 64 * 128
    assert hold_back(aten.cummax.default, value, 1) == 0
    assert hold_back(aten.cummax.default, value.t(), 1) == value.nbytes
    mask = meta(64, 1, dtype=torch.bool)
    assert hold_back(aten.masked_scatter.default, value, mask, value) == (8 + 1) * 64 * 128 + 8 * 64 * 128 // 256 + 4096


def test_the_largest_elements_have_their_places_beside_them() -> None:
    value, parts = meta(16384, 4096), 12 * 128 // 32 * (32 * 4)
    assert hold_back(aten.argmax.default, value, 0) == hold_back(aten.max.dim, value, 0) == 16 * 4096 * parts + 4 * 32
    assert hold_back(aten.max.default, meta(64, 64)) == hold_back(aten.max.other, value, value) == 0
    assert hold_back(aten.logsumexp.default, meta(64, 128), [1]) == 2 * 64 * 128 + 2 * 64


def test_pools_copy_what_does_not_lie_in_rows() -> None:
    value = meta(2, 8, 16, 16)
    last = value.to(memory_format=torch.channels_last)
    for given, num_bytes in ((value, 0), (last, 0), (value.transpose(0, 1), value.nbytes)):
        assert hold_back(aten.avg_pool2d.default, given, [2, 2]) == num_bytes
    backward = (aten.max_pool2d_with_indices_backward.default, last, value, [1, 1], [1, 1], [0, 0], [1, 1], False)
    indices = meta(2, 8, 16, 16, dtype=INT64)
    assert hold_back(*backward, indices) == 2 * value.nbytes + indices.nbytes


def test_the_norm_of_groups_has_numbers_for_each_channel() -> None:
    value, weight, each = meta(4, 8, 16), meta(8), meta(4, 2)
    sizes = (4, 8, 16, 2)
    assert hold_back(aten.native_group_norm.default, value, weight, weight, *sizes, 1e-5) == 4 * 4 * 2 * 8
    flags = [True, True, True]
    given = hold_back(aten.native_group_norm_backward.default, value, value, each, each, weight, *sizes, flags)
    assert given == 4 * 4 * (3 * 8 + 2 * 2)


def test_flash_attention_splits_keys_where_rows_are_few() -> None:
    """16 heads of 8 blocks of rows are half of what 128 processors take at once: two parts."""
    assert attention.flash_forward(16, 512, 512, 64, CARD) == 2 * 4 * 16 * 512 * (64 + 1)
    assert attention.flash_forward(16, 512, 512, 40, CARD) == 2 * 4 * 16 * 512 * (64 + 1)
    assert attention.flash_forward(64, 512, 512, 64, CARD) == 0
    assert attention.flash_forward(1, 64, 256, 64, CARD) == 0  # one block of keys


def test_efficient_attention_adds_up_gradients_in_fp32() -> None:
    block, sums = 4 * 64 * 64 + 16, 4 * 16 * 512
    assert attention.efficient_backward(16, 512, 512, 64, 64, True) == sums + 16 * 8 * block
    product = 4 * 16 * 512 * 64
    assert attention.efficient_backward(16, 512, 512, 64, 64, False) == sums + product + sums
    of_keys_and_values = 2 * 8 * 4 * 64 * 128
    assert attention.efficient_backward(16, 512, 512, 128, 128, True) == sums + 16 * (16 * block + of_keys_and_values)
    assert attention.efficient_forward(16, 512, 128, True) == attention.efficient_forward(16, 512, 256, False) == 0
    assert attention.efficient_forward(16, 512, 256, True) == 4 * 16 * 512 * 256


class Mixture(nn.Module):
    """Operators with and without a rule."""

    def __init__(self, width: int):
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.convolution = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, tokens: Tensor) -> Tensor:
        value = self.linear(self.norm(self.table(tokens)))
        value = value + self.convolution(value.transpose(1, 2)).transpose(1, 2)
        scores = torch.softmax(value @ value.transpose(1, 2), -1)
        out: Tensor = (scores @ value).sort(-1).values.mean()
        return out


@pytest.mark.parametrize(
    ("rows", "length", "width"), slow_rows_but([(3, 300, 8)], [(1, 8, 8), (3, 300, 8), (2, 4000, 64)])
)
def test_a_plan_never_needs_less_for_it(rows: int, length: int, width: int) -> None:
    graph = trace(Mixture(width), {"tokens": torch.zeros(rows, length, dtype=torch.long)})
    blocks = apply(draft_of(graph), Coarsen()).blocks
    with mock.patch.object(costs, "workspace_bytes", lambda *call: 0):  # a Mock would keep the tensors
        without = [costs.measure(graph, block, "cuda") for block in blocks]
    more = 0
    for cost, bare in zip([costs.measure(graph, block, "cuda") for block in blocks], without, strict=True):
        for name in ("forward_peak_bytes", "light_peak_bytes", "backward_peak_bytes"):
            most, least = getattr(cost, name), getattr(bare, name)
            assert most >= least
            more += most - least
        assert cost.kept_bytes == bare.kept_bytes
    assert more > 0
