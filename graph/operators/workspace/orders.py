"""Sorts and the largest elements."""

from __future__ import annotations

from ..record import OperatorCall
from .sizes import ceil_div

INDEX_BYTES = 8
SORTED_IN_A_BLOCK = 4096  # elements of a row
SORT_BYTES = 128 * 1024  # histograms of a sort
DIGITS = 256  # of the radix with which the largest are found
BLOCKS_AT_ONCE = 6  # on a multiprocessor, by the registers that the kernel takes
# From these lengths of a row on, several blocks find its largest elements, by the number of rows.
SHARED_FROM = ((20, 20000), (40, 10000), (80, 8000), (200, 5000), (800, 3000), (4000, 800))
SHARED_ANYWAY = 400


def sort(call: OperatorCall) -> int:
    """`sort_stable_kernel` and `sortKeyValueInplace` (SortStable.cu, Sort.cu): the numbers of a row's places; rows that
    no block of threads sorts alone go through CUB's radix sort, which has a copy of keys and places, and of several
    rows also the number of each element's row."""
    value = call.tensor("self")
    if value.dim() == 0 or value.numel() == 0:
        return 0
    dim = call.given.get("dim")
    dim = -1 if dim is None else dim
    length, count, key = int(value.shape[dim]), value.numel(), value.itemsize
    if length <= SORTED_IN_A_BLOCK:
        return INDEX_BYTES * length
    each = 2 * INDEX_BYTES + key if count == length else 3 * INDEX_BYTES + 2 * key
    if value.stride(dim) != 1:
        each += INDEX_BYTES + 2 * key
    return each * count + count // 2 + SORT_BYTES


def topk(call: OperatorCall) -> int:
    """`launch_gather_topk_kernel` (TensorTopK.cu), of which `mbtopk` has counts of digits for each block of a row."""
    value = call.tensor("self")
    if value.dim() == 0 or value.numel() == 0:
        return 0
    length = int(value.shape[call["dim"]])
    rows = value.numel() // length
    if length < next((least for most, least in SHARED_FROM if rows <= most), SHARED_ANYWAY):
        return 0
    at_once = call.gpu.processors * BLOCKS_AT_ONCE * DIGITS
    elements = min(64, max(4, ceil_div(value.numel(), at_once)))  # for one thread
    blocks = ceil_div(length, elements * DIGITS)
    return rows * (4 * DIGITS + 32 + (2 * DIGITS + 24) * blocks) + 4096
