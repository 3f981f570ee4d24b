"""Tensors that a batch may hold: their values are stored in memory as they are, and they need no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ir.errors import BatchError
from ...runtime.torch_names import DisableTorchFunctionSubclass


def plain_tensor(name: str, value: Any) -> Tensor:
    """The tensor itself, with a pending conjugation or negation carried out, and without a subclass that only adds
    methods.

    Raises `BatchError` for tensors that are sparse, nested, quantized, on meta, or without memory, for those that need
    a gradient, and for subclasses that keep their values elsewhere.
    """
    if not isinstance(value, Tensor):
        raise BatchError(f"batch[{name!r}] only describes a tensor ({value}); pass the tensor. Nothing has run")
    fault, advice = _fault(value)
    if fault:
        raise BatchError(f"batch[{name!r}] {fault}; {advice}. Nothing has run")
    with DisableTorchFunctionSubclass():
        plain: Tensor = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        return plain.clone() if plain.is_inference() else plain  # autograd saves no inference tensors


def _fault(value: Tensor) -> tuple[str, str]:
    """The fault of a tensor, and what to pass instead; both empty for a plain tensor."""
    kind = type(value)
    if value.is_nested:
        return "is nested", "pad its rows to one length: torch.nested.to_padded_tensor(value, 0)"
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        advice = "pass a torch.Tensor, such as full_tensor() of a DTensor"
        return f"is a {kind.__module__}.{kind.__name__}, whose values are stored elsewhere", advice
    if value.layout != torch.strided:
        return f"has the layout {str(value.layout).removeprefix('torch.')}", "pass value.to_dense()"
    if value.is_quantized:
        return f"is quantized ({str(value.dtype).removeprefix('torch.')})", "pass value.dequantize()"
    if value.is_meta:
        return "is on the meta device and has no values", "pass tensors on the CPU or a GPU"
    if value.requires_grad:
        return (
            "requires a gradient, and a job computes those of the compiled model's parameters only",
            "pass value.detach(), and compile what computes it as a part of the model if that is to be trained",
        )
    if value.numel() and value.untyped_storage().nbytes() == 0:
        return "has no memory any more (its storage was resized to 0)", "pass a copy that was made before"
    return "", ""
