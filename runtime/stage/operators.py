"""The operators whose results a stage keeps for backward, or makes again in it, and the tensors that a call writes.

The compiler's records (`graph/operators`) do not repeat these: workers need them, and must not import the compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
# These give the log-sum-exp of rows only where `compute_log_sumexp` is given, which forwards without autograd do not.
GIVES_ROWS = frozenset(
    (aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default)
)
# All give output and log-sum-exp first. Which one runs depends on the device; it is one call in any case.
CUDA_ATTENTION = GIVES_ROWS | {aten._scaled_dot_product_flash_attention.default}
# Each product is one call on CPU and on CUDA, whatever the kernels.
COSTLY = CUDA_ATTENTION | {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default,
    aten._scaled_mm.default, aten.convolution.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
}  # fmt: skip
_ONE_PASS = frozenset(
    (aten._to_copy.default, aten.cat.default, aten.native_layer_norm.default, aten._fused_rms_norm.default)
)


@functools.cache
def is_cheap(func: Any) -> bool:
    """Whether a call passes over its operands once, draws nothing and writes nothing."""
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    return torch.Tag.pointwise in func.tags or func in _ONE_PASS


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an aten op writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that a call writes."""
    for position, name in written_arguments(func):
        value = args[position] if position < len(args) else kwargs.get(name)
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor))
