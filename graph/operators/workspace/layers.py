"""Layers: norms, softmax, products and convolutions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..record import OperatorCall
from .reductions import reduction_bytes
from .sizes import ceil_div

FP32_BYTES = 4
MANY_ROWS = 64 * 1024
COLUMNS = ROWS = 32  # of a block of threads
MOST_BLOCKS = 64 * 1024 // 2


def norm_backward(call: OperatorCall) -> int:
    """`LaunchGammaBetaBackwardCUDAKernel` (layer_norm_kernel.cu): many short rows are added up in parts, for weight and
    bias each, which a sum then adds up."""
    grad, wanted = call.tensor("grad_out"), call["output_mask"][1:]
    width: int = math.prod(call["normalized_shape"])
    rows = grad.numel() // max(1, width)
    if rows <= MANY_ROWS or width // COLUMNS >= call.gpu.processors // 2 or not any(wanted):
        return 0
    parts = min(MOST_BLOCKS // ceil_div(width, COLUMNS), ceil_div(rows, ROWS))
    adding = reduction_bytes(grad.new_empty((parts, width), device="meta"), 0, 4, call.gpu)
    return sum(map(bool, wanted)) * parts * width * grad.itemsize + adding


def group_norm(call: OperatorCall) -> int:
    """`GroupNormKernelImplInternal` (group_norm_kernel.cu): a factor and a summand for each channel of each sample."""
    return 2 * FP32_BYTES * int(call["N"]) * int(call["C"])


def group_norm_backward(call: OperatorCall) -> int:
    """`GroupNormBackwardKernelImplInternal` (group_norm_kernel.cu): for each channel of each sample two sums and a
    factor, for each group of each sample two numbers."""
    samples, channels, groups = (int(call[name]) for name in ("N", "C", "group"))
    return FP32_BYTES * samples * (3 * channels + 2 * groups)


def softmax_backward(call: OperatorCall) -> int:
    """`softmax_backward_cuda_out` (SoftMax.cu): the gradient times the result."""
    return call.tensor("grad_output").nbytes


def product(call: OperatorCall) -> int:
    """`prepare_matrix_for_cublas` and `prepare_batch_matrix_for_cublas` (Blas.cpp): a copy of an operand in which
    neither rows nor columns are contiguous."""
    names = [name for name in ("mat1", "mat2", "batch1", "batch2") if name in call.given]
    operands = [call.tensor(name) for name in names or ("self", "mat2")]
    if len(operands) == 1:
        operands.insert(0, call.tensor("self"))
    return sum(t.numel() * t.itemsize for t in operands if not _is_matrix(t))


def _is_matrix(value: Tensor) -> bool:
    """Whether cuBLAS reads this as a matrix, or the transpose of one."""
    (rows, columns), (down, across) = value.shape[-2:], value.stride()[-2:]
    return (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))


def grid(call: OperatorCall) -> int:
    """`AveragePool2d.cu`, `DilatedMaxPool2d.cu`, `AdaptiveAveragePooling.cu`, `UpSampleBilinear2d.cu` and
    `UpSampleNearest2d.cu`: copies of operands with gaps, or in the layout of another one."""
    operands = [value for value in call.given.values() if isinstance(value, Tensor)]
    if all(value.is_contiguous() for value in operands) or all(map(_has_channels_last, operands)):
        return 0
    return sum(value.nbytes for value in operands)


def convolution(call: OperatorCall) -> int:
    """`run_conv_plan` (Conv_v8.cpp) takes what the plan that cuDNN's heuristics put first asks for.

    No source bounds it. Kernels for tensor cores take channels last, so that operands and result in another layout are
    copied, which is what counts here; `try_plans` leaves out a plan for whose workspace memory is missing."""
    return _copied_bytes(call.tensor("input"), call.tensor("weight"), result=call.out)


def convolution_backward(call: OperatorCall) -> int:
    """`run_conv_plan` (Conv_v8.cpp), once for the gradient of the input and once for that of the weight: copies with
    channels last as in forward, and the weight's gradient in fp32, which several blocks of threads add up."""
    grad, value, weight = (call.tensor(name) for name in ("grad_output", "input", "weight"))
    of_input, of_weight, *_ = call["output_mask"]
    input_bytes = _copied_bytes(grad, weight, result=value) if of_input else 0
    weight_bytes = _copied_bytes(grad, value, result=weight) + 4 * weight.numel() if of_weight else 0
    return max(input_bytes, weight_bytes)


def _copied_bytes(*operands: Tensor, result: Tensor) -> int:
    """The bytes of operands without channels last, and of the result where no operand has them."""
    others = [operand for operand in operands if not _has_channels_last(operand)]
    return sum(t.nbytes for t in (*others, *([result] if len(others) == len(operands) else ())))


def _has_channels_last(value: Tensor) -> bool:
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
    return layout is not None and value.is_contiguous(memory_format=layout)
