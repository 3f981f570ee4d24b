"""The aten calls of a block as rows of a mix: products and attention by shape, all others by their bytes.

In: calls as the cost model's meter sees them on fake tensors. Out: a `CallMix`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from ...ir.machine.call_mix import AttentionCall, CallMix, PointwiseCall, Product, flops_of, merge_rows
from ...runtime.torch_names import current_dispatch_modes


class KernelCalls:
    """A dispatch mode that counts calls and their FLOPs."""

    def kernel(self, call: Product | AttentionCall) -> None:
        raise NotImplementedError

    def note_results(self, call: Product | AttentionCall, results: tuple[Tensor, ...]) -> None:
        """Results of the kernel, if it is a costly call in forward, as a class of saved tensors."""

    def note_workspace(self, num_bytes: int) -> None:
        """Bytes that a call holds while it runs, beside what is alive after it."""


def count_call(call: Product | AttentionCall, *results: Tensor) -> None:
    """Tell the active modes of a call that stands for a kernel, and of its results that a class would keep."""
    for mode in current_dispatch_modes():
        if isinstance(mode, KernelCalls):
            mode.kernel(call)
            if results:
                mode.note_results(call, results)


def count_workspace(num_bytes: int) -> None:
    """Tell the active modes what a kernel holds while it runs."""
    for mode in current_dispatch_modes():
        if isinstance(mode, KernelCalls):
            mode.note_workspace(num_bytes)


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

    def note(self, rows: Sequence[Product | AttentionCall] | None, flops: float, moved_bytes: int, times: int) -> None:
        """`times` calls that are these rows, by their records, and read and write `moved_bytes`. Where that is not
        known, those with FLOPs have no row."""
        for row in [*(rows or ())] * times:
            self.add(row)
        if rows is None and not flops:
            self.pointwise[moved_bytes] += times

    def mix(self, flops: float, traffic_bytes: float) -> CallMix:
        """The mix of calls that these sums add up. FLOPs of no row are those of calls of other kinds."""
        products = merge_rows((row, 1) for row in self.products)
        attention = merge_rows((row, 1) for row in self.attention)
        known = flops_of(products) + flops_of(attention)
        pointwise = tuple(PointwiseCall(size, count) for size, count in self.pointwise.items())
        return CallMix(products, attention, pointwise, max(0.0, flops - known), traffic_bytes)
