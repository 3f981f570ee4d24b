"""What torch's CUDA operators take from the caching allocator while they run, beside their operands and results.

Run as `python -m penstock.tests.gpu.operator_memory` to print the bytes of each call in `CALLS` as JSON. On emulated
GPUs it needs the settings of `HOST_CODE_ONLY`: torch's own host code runs then, and its kernels compute nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from penstock.runtime.functions.document_borders import attend_in_borders, side_by_side

HAS_DOCUMENTS = torch.__version__ >= "2.13"  # before that varlen_attn takes no key heads of their own
HOST_CODE_ONLY = {"FAKECUDA_TORCH": "", "FAKECUDA_STRICT": "0", "FAKECUDA_POISON": "0", "FAKECUDA_DELAY_US": "0"}
aten = torch.ops.aten
BF16, FP32, INT64 = torch.bfloat16, torch.float32, torch.int64
Shape = tuple[int, ...]


@dataclass(frozen=True)
class OperatorRun:
    """A call of an aten operator: tensors by shape and dtype, each other argument as it is."""

    operator: Any
    arguments: tuple[Any, ...]

    def on(self, device: str) -> tuple[Any, ...]:
        return tuple(_make(argument, device) for argument in self.arguments)


@dataclass(frozen=True)
class AttentionRun:
    """Attention of heads that lie after their rows, as projections leave them. `masked`: with a mask that is added."""

    heads: int
    rows: int
    width: int
    dtype: torch.dtype
    masked: bool = False


@dataclass(frozen=True)
class PackedRun:
    """Attention of two rows of documents, with room for `most` of them."""

    heads: int
    key_heads: int
    rows: int
    width: int
    most: int


def _make(argument: Any, device: str) -> Any:
    if isinstance(argument, list):
        return [_make(part, device) for part in argument]
    if not (isinstance(argument, tuple) and len(argument) == 2 and isinstance(argument[1], torch.dtype)):
        return argument
    return torch.zeros(argument[0], dtype=argument[1], device=device)


def _norm(rows: int, width: int, dtype: torch.dtype) -> OperatorRun:
    value, each, weight = ((rows, width), dtype), ((rows, 1), FP32), ((width,), dtype)
    flags = [True, True, True]
    arguments = (value, value, [width], each, each, weight, weight, flags)
    return OperatorRun(aten.native_layer_norm_backward.default, arguments)


def _embedding(count: int, width: int, size: int, dtype: torch.dtype) -> OperatorRun:
    grad, indices = ((count, width), dtype), ((count,), INT64)
    return OperatorRun(aten.embedding_dense_backward.default, (grad, indices, size, -1, False))


def _index_put(count: int, width: int, size: int) -> OperatorRun:
    return OperatorRun(
        aten.index_put_.default, (((size, width), BF16), [((count,), INT64)], ((count, width), BF16), True)
    )


OPERATORS: dict[str, OperatorRun] = {
    **{f"sum of rows {shape} {dtype}": OperatorRun(aten.sum.dim_IntList, ((shape, dtype), [0], True))
       for shape in ((300, 768), (4096, 1024), (16384, 4096), (131072, 256), (9000, 50)) for dtype in (BF16, FP32)},
    "sum of columns": OperatorRun(aten.sum.dim_IntList, (((4096, 1024), BF16), [1])),
    "sum of all": OperatorRun(aten.sum.default, (((4096, 1024), BF16),)),
    "sum of the middle": OperatorRun(aten.sum.dim_IntList, (((8, 4096, 64), FP32), [1])),
    "sum of two dimensions": OperatorRun(aten.sum.dim_IntList, (((8, 4096, 64), BF16), [0, 1])),
    "norm": OperatorRun(aten.linalg_vector_norm.default, (((4096, 4096), FP32),)),
    "variance of rows": OperatorRun(aten.var_mean.correction, (((4096, 1024), FP32), [0])),
    "norm's backward": _norm(4096, 1024, BF16),
    "norm's backward of many rows": _norm(131072, 256, BF16),
    "norm's backward of many rows in fp32": _norm(131072, 256, FP32),
    "softmax's backward": OperatorRun(
        aten._softmax_backward_data.default, (((2048, 512), FP32), ((2048, 512), FP32), -1, FP32)),
    "few indices": _embedding(3072, 256, 1000, BF16),
    "table with few rows": _embedding(4096, 256, 1000, BF16),
    "table": _embedding(16384, 1024, 32000, BF16),
    "table in fp32": _embedding(65536, 256, 32000, FP32),
    "narrow table": _embedding(100000, 64, 100000, BF16),
    "addition at indices": _index_put(16384, 256, 32000),
    "few additions at indices": _index_put(1000, 64, 500),
    "sorted rows": OperatorRun(aten.sort.default, (((4096, 1024), FP32),)),
    "sorted numbers": OperatorRun(aten.sort.default, (((100000,), INT64),)),
    "sorted long rows": OperatorRun(aten.sort.default, (((8, 50000), FP32),)),
    "largest of rows": OperatorRun(aten.topk.default, (((16384, 1024), FP32), 8)),
    "largest of short rows": OperatorRun(aten.topk.default, (((16384, 64), FP32), 8)),
    "largest of long rows": OperatorRun(aten.topk.default, (((8, 50000), FP32), 50)),
    **{f"scan of numbers {operator} {dtype}": OperatorRun(operator, (((1 << 24,), dtype), 0))
       for operator in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
       for dtype in (BF16, FP32)},
    "scan of large numbers": OperatorRun(aten.cumsum.default, (((1 << 26,), INT64), 0)),
    "scan of rows": OperatorRun(aten.cumsum.default, (((4096, 1024), FP32), 1)),
    "scan of columns": OperatorRun(aten.cumsum.default, (((4096, 1024), BF16), 0)),
    "scan of a mask": OperatorRun(aten.cumsum.default, (((4096, 1024), torch.bool), 1)),
    "largest so far": OperatorRun(aten.cummax.default, (((4096, 1024), FP32), 1)),
    "masked rows": OperatorRun(aten.masked_scatter.default, (
        ((4096, 1024), BF16), ((4096, 1024), torch.bool), ((4096, 1024), BF16))),
    "masked rows of one mask": OperatorRun(aten.masked_scatter.default, (
        ((4096, 1024), BF16), ((4096, 1), torch.bool), ((4096, 1024), BF16))),
    **{f"largest place {shape} {dim}": OperatorRun(aten.argmax.default, ((shape, FP32), dim))
       for shape, dim in (((65536, 1024), 0), ((4096, 1024), 1), ((8, 1 << 20), 1), ((4096, 1024), None))},
    "largest and place": OperatorRun(aten.max.dim, (((65536, 1024), BF16), 0)),
    "largest of all": OperatorRun(aten.max.default, (((4096, 1024), FP32),)),
    **{f"logsumexp {dim} {dtype}": OperatorRun(aten.logsumexp.default, (((4096, 1024), dtype), [dim]))
       for dim in (0, 1) for dtype in (BF16, FP32)},
    "group norm": OperatorRun(aten.native_group_norm.default, (
        ((64, 1024, 16), FP32), ((1024,), FP32), ((1024,), FP32), 64, 1024, 16, 32, 1e-5)),
    "group norm's backward": OperatorRun(aten.native_group_norm_backward.default, (
        ((64, 1024, 16), BF16), ((64, 1024, 16), BF16), ((64, 32), BF16), ((64, 32), BF16), ((1024,), BF16),
        64, 1024, 16, 32, [True, True, True])),
    **{f"none for {operator}": OperatorRun(operator, arguments) for operator, arguments in (
        (aten.scatter_add.default, (((1000, 64), FP32), 0, ((4096, 64), INT64), ((4096, 64), FP32))),
        (aten.scatter_reduce.two, (((1000, 64), BF16), 0, ((4096, 64), INT64), ((4096, 64), BF16), "amax")),
        (aten.index_add.default, (((1000, 64), FP32), 0, ((4096,), INT64), ((4096, 64), FP32))),
        (aten.index_copy.default, (((1000, 64), FP32), 0, ((512,), INT64), ((512, 64), FP32))),
        (aten.native_dropout.default, (((4096, 1024), BF16), 0.1, True)),
        (aten.glu.default, (((4096, 1024), BF16), 1)),
        (aten.avg_pool2d.default, (((32, 64, 56, 56), FP32), [3, 3], [2, 2])),
        (aten.max_pool2d_with_indices.default, (((32, 64, 56, 56), FP32), [3, 3], [2, 2])),
        (aten.max_pool2d_with_indices_backward.default, (((32, 64, 27, 27), FP32), ((32, 64, 56, 56), FP32),
         [3, 3], [2, 2], [0, 0], [1, 1], False, ((32, 64, 27, 27), INT64))),
        (aten.avg_pool2d_backward.default, (((32, 64, 27, 27), FP32), ((32, 64, 56, 56), FP32), [3, 3], [2, 2], [0, 0],
         False, True, None)),
        (aten.upsample_nearest2d.default, (((8, 64, 56, 56), FP32), [112, 112])),
        (aten.upsample_bilinear2d_backward.default, (((8, 64, 112, 112), FP32), [112, 112], [8, 64, 56, 56], False)),
        (aten._adaptive_avg_pool2d.default, (((32, 64, 56, 56), FP32), [7, 7])),
        (aten.upsample_bilinear2d.default, (((8, 64, 56, 56), FP32), [112, 112], False)),
    )},
    "layer's product": OperatorRun(aten.mm.default, (((512, 512), BF16), ((512, 512), BF16))),
}  # fmt: skip

ATTENTION: dict[str, AttentionRun] = {
    f"attention {run}": run
    for run in (
        *(AttentionRun(8, rows, width, BF16) for rows in (512, 1000, 2048) for width in (40, 64, 128, 256)),
        *(AttentionRun(8, rows, width, FP32) for rows in (512, 2048) for width in (32, 64, 96, 128, 256)),
        *(AttentionRun(heads, rows, width, BF16, masked=True)
          for heads in (8, 32) for rows in (512, 2048) for width in (64, 128, 256)),
    )
}  # fmt: skip


PACKED: dict[str, PackedRun] = {
    f"documents {run}": run
    for run in (
        *(PackedRun(8, 8, rows, width, most)
          for rows in (512, 2048) for width in (40, 64, 128, 192) for most in (2, 66)),
        PackedRun(8, 2, 2048, 64, 34),
    )
}  # fmt: skip


def held_bytes(work: Callable[[], object]) -> int:
    """The most that `work` takes beside its results; its second run counts, when all that stays is there."""
    work()
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = work()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() >= before_bytes
    del results
    return found


def attention_bytes(run: AttentionRun) -> tuple[int, int]:
    """Of forward and of backward."""
    query, key, value = (
        torch.zeros(2, run.rows, run.heads, run.width, device="cuda", dtype=run.dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    )
    mask = torch.zeros(2, 1, run.rows, run.rows, device="cuda", dtype=run.dtype) if run.masked else None
    forward_bytes = held_bytes(lambda: scaled_dot_product_attention(query, key, value, mask))
    out = scaled_dot_product_attention(query, key, value, mask)
    grad = torch.zeros_like(out)
    backward = out.grad_fn
    assert backward is not None
    # Called by this thread: a thread of autograd's engine lets go of what it held at a time of its own.
    return forward_bytes, held_bytes(lambda: backward(grad))


def packed_bytes(run: PackedRun) -> tuple[int, int]:
    """Of forward and of backward. Kernels that compute nothing find no borders, of which the host knows nothing."""
    query, key, value = (
        torch.zeros(2, run.rows, heads, run.width, device="cuda", dtype=BF16).transpose(1, 2).requires_grad_()
        for heads in (run.heads, run.key_heads, run.key_heads)
    )
    borders = torch.zeros(run.most + 1, device="cuda", dtype=torch.int32)
    work = partial(attend_in_borders, query, key, value, borders, None)
    forward_bytes = held_bytes(work)
    out = work()
    grad = torch.zeros_like(out)
    flat = side_by_side(grad)
    backward: Any = out.grad_fn
    while "varlen" not in type(backward).__name__:
        backward = backward.next_functions[0][0]
    *operands, begins, ends, result, sums, draws = backward.saved_tensors
    own = (flat, *operands, result, sums, begins, ends, run.rows, run.rows, True, draws, None, [-1, 0])
    return forward_bytes, held_bytes(partial(torch.ops.torch_attn._varlen_attn_backward, *own))


def main() -> None:
    found: dict[str, Any] = {}
    for name, run in OPERATORS.items():
        found[name] = held_bytes(partial(run.operator, *run.on("cuda")))
    for name, attention in ATTENTION.items():
        torch.cuda.empty_cache()
        found[name] = attention_bytes(attention)
    for name, packed in PACKED.items() if HAS_DOCUMENTS else ():
        torch.cuda.empty_cache()
        found[name] = packed_bytes(packed)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
