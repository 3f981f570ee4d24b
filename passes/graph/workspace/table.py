"""Which bytes CUDA's operators hold beside their operands and results while they run: one rule per operator.

In: a call of an aten operator on fake tensors. Out: bytes, 0 for an operator without a rule. Fake tensors do not show
them, since torch's host code allocates them inside the operator. Each rule names the function of PyTorch (2.13) that
says so. What depends on the GPU is that of `LARGEST`: smaller ones need about as much or less. Attention, which is no
single operator here, has its functions in `attention.py`.

cuBLAS's workspace is none of a call: it stays for as long as the process does (`Reserve.libraries_bytes`).
"""

from __future__ import annotations

from typing import Any

from . import indexing, layers, orders, reductions
from .call import LARGEST, RULES, GpuSize, WorkspaceCall

__all__ = ["RULES", "indexing", "layers", "orders", "reductions", "workspace_bytes"]


def workspace_bytes(func: Any, args: Any, kwargs: Any, out: Any, gpu: GpuSize = LARGEST) -> int:
    """The most bytes that a call on CUDA holds at once beside its operands and results."""
    name = str(func._schema.name)
    if not name.startswith("aten::"):
        return 0
    found = RULES.get(name.removeprefix("aten::").rstrip("_"))
    return 0 if found is None else found(WorkspaceCall(func, args, kwargs, out, gpu))
