"""Scans: sums, products and largest elements of all earlier ones."""

from __future__ import annotations

import math

import torch

from ..record import OperatorCall

TILE_BYTES = 4096  # the fewest bytes of values that a block of threads of CUB scans at once
STATUS_BYTES = 16  # of such a tile: its sum, and how far it is
SMALL_BYTES = 4096  # of CUB, whatever the size


def scan(call: OperatorCall) -> int:
    """`scan_dim` (ScanUtils.cuh): a copy of what is not contiguous, after one in the result's dtype where that is
    another (`impl_func_cum_ops`, ReduceOps.cpp); the states of CUB's tiles where there is one row only."""
    value, result = call.tensor("self"), call.out
    if value.dim() == 0 or value.numel() == 0:
        return 0
    copies = (value.dtype != result.dtype) + (not value.is_contiguous())
    is_one_row = value.numel() == value.shape[call["dim"]]
    return int(copies * result.nbytes + (scan_bytes(value.numel(), result.itemsize) if is_one_row else 0))


def largest_so_far(call: OperatorCall) -> int:
    """`scan_dim_with_indices` (ScanUtils.cuh): a copy of what is not contiguous."""
    value = call.tensor("self")
    return 0 if value.is_contiguous() else value.nbytes


def masked_scatter(call: OperatorCall) -> int:
    """`masked_scatter_cuda` and `launch_masked_scatter_kernel` (IndexKernel.cpp, IndexKernel.cu): the number of chosen
    places before each, which a scan finds, and copies of a mask that is broadcast and of a source that is not
    contiguous."""
    value, mask, source = (call.tensor(name) for name in ("self", "mask", "source"))
    count: int = math.prod(torch.broadcast_shapes(value.shape, mask.shape))
    whole_mask = 0 if mask.numel() == count and mask.is_contiguous() else count
    return 8 * count + scan_bytes(count, 8) + whole_mask + (0 if source.is_contiguous() else source.nbytes)


def scan_bytes(count: int, itemsize: int) -> int:
    """`DeviceScan` (CUB): a state for each tile."""
    return count * itemsize * STATUS_BYTES // TILE_BYTES + SMALL_BYTES
