"""Reductions: sums over many rows are split over blocks of threads, which leave their parts in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..record import GpuSize, OperatorCall
from .sizes import ceil_div

Dims = list[tuple[int, int]]  # size and stride, the smallest stride first
MOST_THREADS = 512  # of a block
VECTOR = 4
FEWEST, MOST = 16, 256  # values for one thread
PART_BYTES = {torch.float64: 8, torch.int64: 8}  # of a part of a sum; 4 for all other dtypes
WELFORD_BYTES = 16  # a part of a variance: mean, squares, and the count twice
PLACED_BYTES = 16  # a part of a largest element: itself, and its place


def reduction(call: OperatorCall) -> int:
    """`gpu_reduce_kernel` (Reduce.cuh): the staging buffer, and a counter for each block of outputs."""
    value, given = call.tensor("self"), call.given.get("dim")
    dtype = call.given.get("dtype") or value.dtype
    if not dtype.is_floating_point and call.name in ("sum", "prod"):
        dtype = torch.int64
    return reduction_bytes(value, given, PART_BYTES.get(dtype, 4), call.gpu)


def variance(call: OperatorCall) -> int:
    """`gpu_reduce_kernel` (Reduce.cuh) with `WelfordData` as the part."""
    return reduction_bytes(call.tensor("self"), call.given.get("dim"), WELFORD_BYTES, call.gpu)


def largest(call: OperatorCall) -> int:
    """`gpu_reduce_kernel` (Reduce.cuh), of whole tensors with their own type as the part (`max_values_kernel_cuda`), of
    dimensions with a pair of a value and its place (`argmax_kernel_impl` and `max_launch_kernel`)."""
    value, dim = call.tensor("self"), call.given.get("dim")
    if "other" in call.given:
        return 0
    has_places = call.name.startswith("arg") or dim is not None
    return reduction_bytes(value, dim, PLACED_BYTES if has_places else max(4, value.itemsize), call.gpu)


def logsumexp(call: OperatorCall) -> int:
    """`logsumexp_out_impl` (ReduceOps.cpp): the exponents of all elements less the largest, these, and the parts of
    their sum."""
    value = call.tensor("self")
    exponents = value.new_empty(value.shape, dtype=call.out.dtype, device="meta")
    return int(exponents.nbytes + call.out.nbytes + reduction_bytes(exponents, call["dim"], 4, call.gpu))


def reduction_bytes(value: Tensor, given: int | Sequence[int] | None, part_bytes: int, gpu: GpuSize) -> int:
    """The bytes of a reduction's parts along these dimensions; all for None or an empty list."""
    named = [given] if isinstance(given, int) else list(given or range(value.dim()))
    dims = {dim % max(1, value.dim()) for dim in named}
    sizes = list(zip(value.shape, value.stride()))
    reduced = merge_dims(row for dim, row in enumerate(sizes) if dim in dims)
    kept = merge_dims(row for dim, row in enumerate(sizes) if dim not in dims)
    return 0 if value.numel() == 0 or not reduced else staging_bytes(reduced, kept, part_bytes, gpu)


def merge_dims(rows: Iterable[tuple[int, int]]) -> Dims:
    """Dimensions by rising stride, where dimensions that follow each other in memory are merged."""
    found: Dims = []
    for size, stride in sorted(((size, stride) for size, stride in rows if size > 1), key=lambda row: row[1]):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return found


def staging_bytes(reduced: Dims, kept: Dims, part_bytes: int, gpu: GpuSize) -> int:
    """`setReduceConfig` and `ReduceConfig::global_memory_size` (Reduce.cuh), the names of which these lines keep in
    their order: how blocks of threads share outputs and inputs, and what all of them leave."""
    inputs, outputs = math.prod(size for size, _ in reduced), math.prod(size for size, _ in kept)
    along_inputs = not kept or reduced[0][1] < kept[0][1]
    dim0, dim1 = (inputs, outputs) if along_inputs else (outputs, inputs)
    vector = 1
    if along_inputs and reduced[0][1] == 1 and dim0 >= 128 and len(reduced) == 1:
        dim0 //= VECTOR
    elif not along_inputs and kept[0][1] == 1:
        others = [stride for _, stride in (*reduced, *kept[1:])]
        vector = math.gcd(VECTOR, kept[0][0], *others)
        dim0 //= vector
    width, height = _block(dim0, dim1, MOST_THREADS // vector)
    input_step, output_step = (width, 1) if along_inputs else (1, width)
    if ceil_div(inputs, input_step) < min(height * FEWEST, MOST):
        return 0
    input_step *= height
    values, grid = ceil_div(inputs, input_step), ceil_div(outputs // vector, output_step)
    target = gpu.processors * (gpu.threads // (width * height))
    if values < MOST or grid > target:
        return 0
    blocks = max(min(ceil_div(target, grid), ceil_div(values, FEWEST)), ceil_div(values, MOST))
    if blocks == 1:
        return 0
    return part_bytes * outputs * blocks * (1 if along_inputs else width * vector) + 4 * grid


def _block(dim0: int, dim1: int, most: int) -> tuple[int, int]:
    """`ReduceConfig::set_block_dimension`: the width and height of a block of threads."""
    size0, size1 = (most if dim >= most else 1 << max(dim, 1).bit_length() - 1 for dim in (dim0, dim1))
    height = min(size1, most // min(size0, 32))
    return min(size0, most // height), height
