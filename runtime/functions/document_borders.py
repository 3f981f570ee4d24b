"""Attention in documents by torch's kernel for sequences of any length, side by side.

The kernel takes the places where documents begin as a tensor, whose size is the number of documents. That number is
other in each batch, and the host reads no batch that a GPU has: so the tensor has room for the plan's number of
documents, and the places left over are empty documents at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from ..accelerator import has_flash
from ..torch_names import assert_async

WIDEST = 192  # heads; the backward of wider ones needs more shared memory than gaming cards have
MOST_DOCUMENTS = (1 << 16) - 1  # blocks of threads along one dimension of a grid
_now = threading.local()  # `is_trial`: whether the thread's values are made up


def document_borders(documents: Tensor, most: int) -> Tensor:
    """The beginnings of the documents of all rows, one row after the other, and the number of tokens for the rest of
    `most` documents, and at the end: int32 [most + 1].

    documents: [rows, places], numbers that grow from one document of a row to the next. Raises IndexError for more than
    `most` documents; on a GPU that is an assertion on the device.
    """
    if getattr(_now, "is_trial", False):
        rows, length = documents.shape
        return (torch.arange(most + 1, dtype=torch.int32, device=documents.device) * length).clamp_(max=rows * length)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=1.0)  # so does each row
    number = begins.flatten().cumsum(0) - 1  # of each token's document, in all rows
    if type(documents) is Tensor and not documents.is_meta:  # one with values
        fits = number[-1] < most
        message = f"the rows of a micro-batch hold more than the {most} documents that the plan has room for"
        if documents.is_cuda:
            assert_async(fits, message)
        elif not fits:
            raise IndexError(message)
    return torch.searchsorted(number, torch.arange(most + 1, device=documents.device), out_int32=True)


@contextmanager
def trial() -> Iterator[None]:
    """Within this, positions are made up: each row is one document, whatever they say."""
    _now.is_trial = True
    try:
        yield
    finally:
        _now.is_trial = False


def takes_borders(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> bool:
    """Whether torch's kernel runs on these operands where they are."""
    return query.is_cuda and dropout_p <= 0 and fits_kernel(query, key, value) and has_flash(query.device.index)


def fits_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether operands [rows, heads, places, width] are of dtypes and sizes that the kernel takes."""
    half = query.dtype in (torch.float16, torch.bfloat16) and query.dtype == key.dtype == value.dtype
    width = query.shape[-1]
    same = width == key.shape[-1] == value.shape[-1] and query.shape[-2] == key.shape[-2]
    return half and same and width % 8 == 0 and width <= WIDEST and query.shape[1] % key.shape[1] == 0


def attend_in_borders(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float | None) -> Tensor:
    """Causal attention in the documents that begin at `borders`."""
    from torch.nn.attention.varlen import varlen_attn  # registers operators: not where nothing is packed

    length = query.shape[-2]
    q, k, v = (side_by_side(operand) for operand in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    out = varlen_attn(
        q, k, v, borders, borders, length, length, scale=scale, window_size=(-1, 0), enable_gqa=is_grouped
    )
    assert isinstance(out, Tensor)
    return split_rows(out, query.shape[0])


def side_by_side(operand: Tensor) -> Tensor:
    """[rows, heads, places, width] as [rows * places, heads, width], without a copy where the layout allows."""
    return operand.transpose(1, 2).flatten(0, 1)


def split_rows(result: Tensor, rows: int) -> Tensor:
    """The inverse of `side_by_side`."""
    return result.view(rows, -1, *result.shape[1:]).transpose(1, 2)
