"""The records of all operators, and the bytes that CUDA's operators hold beside operands and results while they run.

In: a call of an aten operator on fake tensors. Out: bytes, None for an operator of which nothing is known. Fake tensors
do not show them, since torch's host code allocates them inside the operator. Each function in `workspace/` names the
function of PyTorch (2.13) that it follows; docs/versions.md has what was compared with later releases. What depends on
the GPU is that of `LARGEST`: smaller ones need about as much or less. Attention, which is no single operator here, has
its functions in `workspace/attention.py`.

Nothing is known of operators whose kernels are a library's that tells its sizes only to a running program: cuDNN's
batch norm (`native_batch_norm` here), recurrent layers, and attention, which torch takes first on GPUs of compute
capability 9.0 and 10.0.

cuBLAS's workspace is none of a call: it stays for as long as the process does (`Reserve.libraries_bytes`).
"""

from __future__ import annotations

from typing import Any

from ...ir.extensions import entries
from ...ir.machine.call_mix import AttentionCall, Product
from . import contractions, indexing, layers, pointwise, reductions, views
from .record import LARGEST, OPERATORS, GpuSize, OperatorCall, is_pointwise, operator_of

__all__ = ["OPERATORS", "kernel_rows", "operator_of", "workspace_bytes"]
FILES = (contractions, indexing, layers, pointwise, reductions, views)  # each enters its records
OPERATORS.update(entries("penstock.operators", OPERATORS.__contains__))  # records of other distributions


def kernel_rows(func: Any, args: Any, kwargs: Any, out: Any) -> tuple[Product | AttentionCall, ...] | None:
    """The products or the attention that a call is; None if that is not known."""
    rule = operator_of(func).kernel
    return None if rule is None else rule(OperatorCall(func, args, kwargs, out))


def workspace_bytes(func: Any, args: Any, kwargs: Any, out: Any, gpu: GpuSize = LARGEST) -> int | None:
    """The most bytes that a call on CUDA holds at once beside its operands and results; None if it is not known."""
    rule = operator_of(func).workspace
    if rule is not None:
        return rule(OperatorCall(func, args, kwargs, out, gpu))
    is_query = func.namespace == "prim"  # of a tensor's device or layout
    return 0 if is_query or is_pointwise(func) or func.is_view else None
