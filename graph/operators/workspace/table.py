"""Which bytes CUDA's operators hold beside their operands and results while they run: one rule per operator.

In: a call of an aten operator on fake tensors. Out: bytes, None for an operator of which nothing is known. Fake tensors
do not show them, since torch's host code allocates them inside the operator. Each rule names the function of PyTorch
(2.13) that says so. What depends on the GPU is that of `LARGEST`: smaller ones need about as much or less. Attention,
which is no single operator here, has its functions in `attention.py`.

Without a rule are operators whose kernels are a library's that tells its sizes to a running program only: cuDNN's batch
norm (`native_batch_norm` here), recurrent layers, and attention, which torch takes first on GPUs of compute capability
9.0 and 10.0.

cuBLAS's workspace is none of a call: it stays for as long as the process does (`Reserve.libraries_bytes`).
"""

from __future__ import annotations

from typing import Any

import torch

from . import indexing, layers, orders, reductions, scans
from .call import LARGEST, RULES, GpuSize, WorkspaceCall

__all__ = ["RULES", "indexing", "layers", "orders", "reductions", "scans", "workspace_bytes"]

# Their kernels read operands and write results, and need no more; so do views and what torch calls pointwise.
HOLD_NOTHING = frozenset(
    f"aten::{name}"
    for name in (
        "_fused_rms_norm", "_log_softmax", "_log_softmax_backward_data", "_softmax", "_to_copy", "_unsafe_view",
        "arange", "bucketize", "cat", "clone", "constant_pad_nd", "copy_", "dot", "embedding", "empty", "empty_like",
        "empty_permuted", "empty_strided", "fill_", "flip", "floor_divide", "full", "full_like", "gather", "glu",
        "index", "index_add", "index_copy", "index_select", "leaky_relu_backward", "native_dropout",
        "native_dropout_backward", "native_layer_norm", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros", "nll_loss_backward", "nll_loss_forward", "ones", "ones_like", "roll", "scalar_tensor", "scatter",
        "scatter_add", "scatter_reduce", "searchsorted", "select_backward", "slice_backward", "stack", "tril", "triu",
        "zero_", "zeros", "zeros_like",
    )
)  # fmt: skip
# Their kernels write the whole weight, which is their result, and need no more.
HOLD_NOTHING |= {"bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_blockwise"}


def workspace_bytes(func: Any, args: Any, kwargs: Any, out: Any, gpu: GpuSize = LARGEST) -> int | None:
    """The most bytes that a call on CUDA holds at once beside its operands and results; None if it is not known."""
    name = str(func._schema.name)
    found = RULES.get(name.removeprefix("aten::").rstrip("_")) if name.startswith("aten::") else None
    if found is not None:
        return found(WorkspaceCall(func, args, kwargs, out, gpu))
    is_query = name.startswith("prim::")  # of a tensor's device or layout
    return 0 if is_query or name in HOLD_NOTHING or torch.Tag.pointwise in func.tags or func.is_view else None
