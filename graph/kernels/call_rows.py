"""The aten calls of a block as rows of a mix: products and attention by shape, all others by their bytes.

In: calls as the cost model's meter sees them on fake tensors. Out: a `CallMix`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...ir.machine.call_mix import FLASH, AttentionCall, CallMix, PointwiseCall, Product, flops_of, merge_rows
from ...runtime.torch_names import current_dispatch_modes

aten = torch.ops.aten
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PRODUCTS = {aten.mm: 0, aten.addmm: 1, aten.bmm: 0, aten.baddbmm: 1}  # the place of the left operand
CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: 0,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 1,
}  # the place of the queries
MOVES_NOTHING = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}


class KernelCalls:
    """A dispatch mode that counts calls and their FLOPs."""

    def kernel(self, call: Product | AttentionCall) -> None:
        raise NotImplementedError

    def made(self, call: Product | AttentionCall, results: tuple[Tensor, ...]) -> None:
        """What the kernel gave, if it is a costly call in forward, as a class of saved tensors."""

    def held(self, num_bytes: int) -> None:
        """Bytes that a call holds while it runs, beside what is alive after it."""


def count_call(call: Product | AttentionCall, *results: Tensor) -> None:
    """Tell the active modes of a call that stands for a kernel, and of its results that a class would keep."""
    for mode in current_dispatch_modes():
        if isinstance(mode, KernelCalls):
            mode.kernel(call)
            if results:
                mode.made(call, results)


def count_workspace(num_bytes: int) -> None:
    """Tell the active modes what a kernel holds while it runs."""
    for mode in current_dispatch_modes():
        if isinstance(mode, KernelCalls):
            mode.held(num_bytes)


class MixRows:
    """Rows of a mix that grows call by call."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.attention: list[AttentionCall] = []
        self.pointwise: Counter[int] = Counter()

    def add(self, call: Product | AttentionCall) -> None:
        if isinstance(call, Product):
            self.products.append(call)
        else:
            self.attention.append(call)

    def note(self, func: Any, args: Sequence[Any], flops: float, moved_bytes: int, times: int = 1) -> None:
        """`times` calls that read and write `moved_bytes`; those with FLOPs that are no products have no row."""
        packet = func._overloadpacket
        if packet in PRODUCTS:
            self.products += [_product(*args[PRODUCTS[packet] :][:2])] * times
        elif packet in CPU_ATTENTION:
            self.attention += [_cpu_attention(func, args, CPU_ATTENTION[packet])] * times
        elif not flops and packet not in MOVES_NOTHING:
            self.pointwise[moved_bytes] += times

    def mix(self, flops: float, traffic_bytes: float) -> CallMix:
        """The mix behind these sums. FLOPs of no row are those of calls of other kinds."""
        products = merge_rows((row, 1) for row in self.products)
        attention = merge_rows((row, 1) for row in self.attention)
        known = flops_of(products) + flops_of(attention)
        pointwise = tuple(PointwiseCall(size, count) for size, count in self.pointwise.items())
        return CallMix(products, attention, pointwise, max(0.0, flops - known), traffic_bytes)


def _product(left: Tensor, right: Tensor) -> Product:
    *batch, m, k = left.shape
    return Product(DTYPES.get(left.dtype, ""), m, right.shape[-1], k, batch[0] if batch else 1)


def _cpu_attention(func: Any, args: Sequence[Any], first: int) -> AttentionCall:
    """A call of the CPU's kernel, which takes every dtype, with a mask or without; its arguments come by position."""
    query, key = args[first], args[first + 1]
    place = [argument.name for argument in func._schema.arguments].index("is_causal")
    causal = place < len(args) and bool(args[place])
    rows, heads, length, width = query.shape
    dtype = DTYPES.get(query.dtype, "")
    return AttentionCall(FLASH, dtype, rows * heads, length, key.shape[-2], width, causal, backward=first == 1)
