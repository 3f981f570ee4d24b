"""Operators that add at indices: they sort the indices first, so that the sum has one order."""

from __future__ import annotations

import math

import torch

from ..record import OperatorCall

INDEX_BYTES = 8
SORT_BYTES = 64 * 1024  # histograms of a sort, whatever its size
FEW_INDICES = 3072  # up to this number are added up without a sort
ROWS_OF_A_PART = 10


def embedding(call: OperatorCall) -> int:
    """`embedding_dense_backward_cuda` (Embedding.cu) sorts the indices and their places, then
    `embedding_backward_cuda_kernel` (EmbeddingBackwardKernel.cu) adds up at most ten rows at a time in fp32.

    The number of the parts is bounded by the indices and the rows of the table, as the host does not know them."""
    grad, count = call.tensor("grad_output"), call.tensor("indices").numel()
    if count <= FEW_INDICES and not call["scale_grad_by_freq"]:
        return 0
    segments = min(count, int(call["num_weights"]))
    parts = count // ROWS_OF_A_PART + segments
    counts = count if call["scale_grad_by_freq"] else 0
    sorted_indices = INDEX_BYTES * (2 * count + counts)
    sorting = INDEX_BYTES * count + 2 * INDEX_BYTES * count + SORT_BYTES
    adding = INDEX_BYTES * (count + 2 * segments + parts) + parts * grad.shape[-1] * max(4, grad.itemsize)
    return sorted_indices + max(sorting, adding)


def index_put(call: OperatorCall) -> int:
    """`index_put_with_sort_kernel` (Indexing.cu): the indices as one number each, these sorted, their places before and
    after, and the sort's own copies. Without `accumulate`, and for masks, nothing is sorted."""
    indices = [index for index in call["indices"] if isinstance(index, torch.Tensor)]
    if not call["accumulate"] or not indices or any(index.dtype == torch.bool for index in indices):
        return 0
    count = math.prod(torch.broadcast_shapes(*(index.shape for index in indices)))
    value = call.tensor("self")
    whole = [size for size, index in zip(value.shape, call["indices"]) if index is None]
    return int(6 * INDEX_BYTES * count * math.prod(whole)) + SORT_BYTES
