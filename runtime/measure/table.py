"""TableTiming the table of rates of one device, CPU or GPU: products by size, attention, calls that read and write.

The caller says how a piece of work is timed there. A call's own overhead is charged per call by whoever uses the table,
so it is taken off the times here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TimeOf = Callable[[Callable[[], object]], float]  # seconds of a piece of work
LONGEST_S = 0.05  # of one product or attention: larger ones are left out
LEAST_GROWTH = 3  # of the time of a product from one size to the next, which is eight times the work
# Where torch prefers cuDNN's kernel, as on Hopper, it computes what others would take the two for.
BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION],
}
ROUNDING = 1e-3  # of the four digits of a document, twice
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TableTiming:
    """A device, how work is timed on it, the overhead of a call, and the sizes that are worth timing there."""

    device: torch.device
    time_of: TimeOf
    overhead_s: float
    sizes: Sequence[int]  # of products, rising
    lengths: Sequence[int]  # of attention's rows, rising
    head_sizes: Sequence[int]
    heads: int  # of a row of attention
    tokens: int  # in all rows of attention together
    tensor_bytes: Sequence[int]  # of the operands of calls that read and write

    def net_s(self, took_s: float) -> float:
        """The seconds of a call without its overhead, at least half of them."""
        return max(took_s - self.overhead_s, took_s / 2)


def measured_table(timing: TableTiming, dtypes: Sequence[str], backends: Sequence[str]) -> dict[str, Any]:
    """The table without its source, as a plain document."""
    products = {dtype: product_curve(timing, DTYPES[dtype]) for dtype in dtypes}
    attention = [row for backend in backends for dtype in dtypes for row in attention_rows(timing, backend, dtype)]
    return {"products": products, "attention": attention, "pointwise": pointwise_curve(timing)}


def product_curve(timing: TableTiming, dtype: torch.dtype) -> dict[int, float]:
    """FLOP/s of the three products of a linear layer, by the size of square ones: forward, and the gradients of its
    input and its weight. Sizes after one that takes long are left out."""
    found: dict[int, float] = {}
    for size in timing.sizes:
        took_s = [timing.net_s(timing.time_of(product)) for product in _products(size, dtype, timing.device)]
        found[size] = len(took_s) * 2 * size**3 / sum(took_s)
        if max(took_s) * LEAST_GROWTH > LONGEST_S:
            break
    return plausible(found, 3.0)


def _products(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], ...]:
    value, weight, grad = (torch.randn(size, size, device=device).to(dtype) for _ in range(3))
    return (
        lambda: torch.nn.functional.linear(value, weight),
        lambda: torch.mm(grad, weight),
        lambda: torch.mm(grad.t(), value),
    )


def attention_rows(timing: TableTiming, backend: str, dtype: str) -> Iterator[dict[str, Any]]:
    """FLOP/s of attention without a mask, by length and size of heads; nothing where the backend cannot compute it. A
    slow device gets fewer rows."""
    shortest = timing.lengths[0]
    for head_size in timing.head_sizes:
        one = _row_operands(timing, 1, shortest, head_size, dtype)
        if not _runs(backend, *one):
            return
        fitting = shortest * int(LONGEST_S / _attention_s(timing, backend, *one)[0])
        forward, backward = {}, {}
        for length in timing.lengths:
            rows = max(1, min(timing.tokens, fitting) // length)
            took_s = _attention_s(timing, backend, *_row_operands(timing, rows, length, head_size, dtype))
            flops = 4.0 * rows * timing.heads * length**2 * head_size
            forward[length], backward[length] = flops / took_s[0], 2.5 * flops / took_s[1]
            if took_s[1] > LONGEST_S:
                break
        yield {
            "backend": backend, "dtypes": [dtype], "head_size": head_size,
            "forward": plausible(forward, 2.0), "backward": plausible(backward, 2.0),
        }  # fmt: skip


def _row_operands(timing: TableTiming, rows: int, length: int, head_size: int, dtype: str) -> tuple[Tensor, ...]:
    """Query, key and value of attention."""
    shape = (rows, timing.heads, length, head_size)
    made = (torch.randn(shape, device=timing.device).to(DTYPES[dtype]).requires_grad_() for _ in range(3))
    return tuple(made)


def _runs(backend: str, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the device has this kernel for these tensors; a CPU has one, which is listed under flash."""
    if query.device.type == "cpu":
        return backend == "flash"
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, False, False)
    can = {"flash": torch.backends.cuda.can_use_flash_attention}
    return bool(can.get(backend, torch.backends.cuda.can_use_efficient_attention)(params))


def _attention_s(timing: TableTiming, backend: str, query: Tensor, key: Tensor, value: Tensor) -> tuple[float, float]:
    attend = torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel(BACKENDS[backend]):
        out = attend(query, key, value)
        grad = torch.ones_like(out)
        forward_s = timing.time_of(lambda: attend(query, key, value))
    backward_s = timing.time_of(lambda: torch.autograd.grad(out, (query, key, value), grad, retain_graph=True))
    return timing.net_s(forward_s), timing.net_s(backward_s)


def pointwise_curve(timing: TableTiming) -> dict[int, float]:
    """Bytes per second that the calls between products read and write, by the bytes of a call.

    A mix of calls, because on a CPU memory does not bound all of them: softmax and GELU reach a tenth of a copy's rate.
    """
    functional = torch.nn.functional
    found = {}
    for num_bytes in timing.tensor_bytes:
        value = torch.randn(num_bytes // 4096, 1024, device=timing.device)

        def mix(value: Tensor = value) -> None:
            normal = functional.layer_norm(value, (1024,))
            active = functional.gelu(normal, approximate="tanh")
            total = normal + active
            (total * torch.softmax(total, -1)).t().contiguous()

        calls, moved_bytes = 6, 14 * num_bytes  # each reads one or two tensors and writes one
        took_s = timing.time_of(mix)
        found[moved_bytes // calls] = moved_bytes / max(took_s - calls * timing.overhead_s, took_s / 2)
    return plausible(found, 1.0)


def plausible(curve: dict[int, float], power: float) -> dict[int, float]:
    """The curve without what only disturbed times can say: that a larger call takes less time than a smaller one, whose
    work grows with this power of the size. Calls that take equally long, as small ones do on a fast GPU, keep the order
    when their rates are rounded."""
    found = dict(curve)
    for before, after in pairwise(sorted(found)):
        found[after] = min(found[after], (1 - ROUNDING) * found[before] * (after / before) ** power)
    return found
