"""The dtypes of CUDA's autocast, on the CPU tensors that plans are made with.

In: the kind of device a plan is for and a low precision. Out: a context under which CPU (and fake) tensors get the
dtypes that the same calls give on that device. The two kinds of device differ in which ops autocast keeps in full
precision: CUDA's layer norms, softmaxes, powers and sums take and give fp32, those of CPUs do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ...runtime.torch_names import DisableAutocast, has_kernel_for_dispatch_key, scoped_library, tree_map

CPU_KEY, CUDA_KEY = "AutocastCPU", "AutocastCUDA"

# The amp page of torch's documentation lists them: of those that take a type for their result that is fp32, of all
# others all inputs are. Ops that CPUs keep in full precision as well are left out.
IN_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
cosine_similarity dist pdist renorm logsumexp upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d softmax.int log_softmax.int cumprod cumsum
linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList
"""


def autocast_as(device_kind: str, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """`torch.autocast` to `dtype` with the rules of a kind of device ("cpu" or "cuda"), for CPU tensors.

    The context does nothing for None and for dtypes that autocast does not lower to.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return nullcontext()
    return _as_cuda(dtype) if device_kind == "cuda" else torch.autocast("cpu", dtype=dtype)


@contextmanager
def _as_cuda(dtype: torch.dtype) -> Iterator[None]:
    with scoped_library("aten", "IMPL") as library, torch.autocast("cpu", dtype=dtype):
        for name in IN_FP32.split():
            if _has_kernel(name, CUDA_KEY) and not _has_kernel(name, CPU_KEY):  # the list changes between versions
                packet, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, packet), overload or "default")
                takes_dtype = any(argument.name == "dtype" for argument in op._schema.arguments)
                library.impl(op, (_result_in_fp32 if takes_dtype else _inputs_in_fp32)(op), CPU_KEY)
        yield


def _has_kernel(name: str, key: str) -> bool:
    return has_kernel_for_dispatch_key(f"aten::{name}", key)


def _inputs_in_fp32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with DisableAutocast():
            args, kwargs = tree_map(_to_fp32, (args, kwargs))
            return op(*args, **kwargs)

    return run


def _result_in_fp32(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args)), **kwargs}
        if _is_eligible(args[0]) and given.get("dtype") is None:
            given["dtype"] = torch.float32
        first = given.pop(names[0])
        with DisableAutocast():
            return op(first, **given)

    return run


def _is_eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _to_fp32(value: Any) -> Any:
    return value.float() if _is_eligible(value) else value
