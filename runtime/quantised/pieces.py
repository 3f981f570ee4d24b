"""Memory of unpacked weights, and weights a few rows at a time: on a CPU libraries allocate several times what they
pack or unpack.

A device on a CPU lends one buffer to all weights that its layers unpack (`lending`). Memory of the heap would not do:
small results between freed weights leave gaps in which the next weight has no room. A weight that forward keeps for
the backward right after it (`keep_unpacked_weights`) has memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..torch_names import FakeTensor

PIECE = 2**18  # elements: libraries allocate at most 8 MiB for them
Lend = Callable[[int], Tensor]
_LEND: ContextVar[Lend | None] = ContextVar("_LEND", default=None)
_KEEP_ON: ContextVar[str] = ContextVar("_KEEP_ON", default="")


def row_pieces(shape: Sequence[int], block: int) -> Iterator[tuple[int, int]]:
    """The first and last + 1 rows of pieces of about `PIECE` elements, each of which begins where a block of `block`
    elements does."""
    rows, width = shape
    step = block // math.gcd(width, block)
    step *= max(1, PIECE // max(1, step * width))
    yield from ((begin, min(begin + step, rows)) for begin in range(0, rows, step))


def is_on_host(packed: Tensor) -> bool:
    """Whether a weight is unpacked on a CPU, here and now."""
    return packed.device.type == "cpu" and not isinstance(packed, FakeTensor) and not torch.compiler.is_compiling()


@contextmanager
def lending(lend: Lend | None) -> Iterator[None]:
    """Let layers unpack weights into the memory that `lend(num_bytes)` returns; None: into memory of their own."""
    token = _LEND.set(lend)
    try:
        yield
    finally:
        _LEND.reset(token)


@contextmanager
def keep_unpacked_weights(device_kind: str) -> Iterator[None]:
    """Let layers that unpack a weight in forward keep it for backward, on a device of this kind. A backward follows
    before another forward begins."""
    token = _KEEP_ON.set(device_kind)
    try:
        yield
    finally:
        _KEEP_ON.reset(token)


def keeps_weights_on() -> str:
    """The kind of device on which forward keeps unpacked weights; "" where backward unpacks them again."""
    return "" if torch.compiler.is_compiling() else _KEEP_ON.get()


def empty_weight(packed: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for an unpacked weight, until the next one is unpacked."""
    lend = _LEND.get() if is_on_host(packed) else None
    if lend is None:
        return packed.new_empty(shape, dtype=dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    return lend(num_bytes)[:num_bytes].view(dtype).view(shape)


torch.library.define("penstock::unpack", "(Tensor[] parts, SymInt[] shape, ScalarType dtype) -> Tensor")


@torch.library.register_fake("penstock::unpack")
def _(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(shape, dtype=dtype)


def fake_weight(parts: Sequence[Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A weight that is unpacked from fake tensors: one call, whichever function unpacks it."""
    unpacked: Tensor = torch.ops.penstock.unpack(list(parts), shape, dtype)
    return unpacked
