"""Attention in blocks, in a window of keys or in documents: what torch's attention gives with the same as a mask."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.runtime.functions import packed_attention, window_attention
from penstock.runtime.functions.document_borders import document_borders, side_by_side, split_rows

# Sums of at most 700 products in another order, of values of order one.
TOLERANCE = 1e-12


def window_mask(queries: int, keys: int, before: int, after: int) -> Tensor:
    distance = torch.arange(keys) - torch.arange(queries)[:, None]
    return (distance >= -before) & (distance <= after)


def operands(queries: int, keys: int, heads: int = 2, key_heads: int = 2, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    shapes = [(2, heads, queries, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def assert_same(found: Tensor, want: Tensor, given: list[Tensor]) -> None:
    torch.testing.assert_close(found, want, rtol=0, atol=TOLERANCE)
    dout = torch.randn_like(want)
    for a, b in zip(torch.autograd.grad(found, given, dout), torch.autograd.grad(want, given, dout)):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 700), st.integers(-40, 40), st.integers(0, 600), st.integers(0, 40), st.booleans(), st.booleans())
def test_equals_a_mask(queries: int, more: int, before: int, after: int, grouped: bool, scaled: bool) -> None:
    keys = max(1, queries + more)
    if keys <= queries - 1 - before:
        return  # the last queries would see nothing
    q, k, v = operands(queries, keys, 4 if grouped else 2)
    mask, scale = window_mask(queries, keys, before, after), 0.25 if scaled else None
    found = window_attention(q, k, v, before, after, scale=scale, enable_gqa=grouped)
    want = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=grouped)
    assert_same(found, want, [q, k, v])


def test_dropout_is_drawn_alike_in_backward() -> None:
    """With one query block the draws are those of torch's attention; the gradient must be of the same draws."""
    q, k, v = operands(100, 100)
    torch.manual_seed(3)
    found = window_attention(q, k, v, 7, 0, dropout_p=0.5)
    torch.manual_seed(3)
    want = F.scaled_dot_product_attention(q, k, v, window_mask(100, 100, 7, 0), 0.5)
    state = torch.get_rng_state()
    assert_same(found, want, [q, k, v])
    assert not torch.equal(torch.get_rng_state(), state)  # `assert_same` draws; backward gave back what it took


def test_backward_leaves_the_generator_as_it_was() -> None:
    q, k, v = operands(300, 300)
    found = window_attention(q, k, v, 7, 0, dropout_p=0.5).sum()
    state = torch.get_rng_state()
    found.backward()
    assert torch.equal(torch.get_rng_state(), state)


def documents_of(rows: int, length: int, seed: int, mean: int) -> Tensor:
    """Numbers of documents of about `mean` tokens."""
    made = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, length, generator=made) < 1 / mean).cumsum(-1)


def documents_mask(documents: Tensor) -> Tensor:
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


@settings(max_examples=25)
@given(st.integers(1, 1100), st.integers(0, 9), st.sampled_from([1, 3, 50, 2000]), st.booleans(), st.booleans())
def test_documents_equal_a_mask(length: int, seed: int, mean: int, grouped: bool, scaled: bool) -> None:
    q, k, v = operands(length, length, 4 if grouped else 2)
    documents, scale = documents_of(2, length, seed, mean), 0.25 if scaled else None
    found = packed_attention(q, k, v, documents, scale=scale, enable_gqa=grouped)
    want = F.scaled_dot_product_attention(q, k, v, documents_mask(documents), scale=scale, enable_gqa=grouped)
    assert_same(found, want, [q, k, v])


def test_documents_of_one_row_hold_for_all() -> None:
    q, k, v = operands(40, 40)
    documents = documents_of(1, 40, 0, 5)
    found = packed_attention(q, k, v, documents)
    assert_same(found, F.scaled_dot_product_attention(q, k, v, documents_mask(documents)), [q, k, v])


def test_borders_are_where_documents_begin() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]])
    found = document_borders(documents, 7)
    assert found.dtype == torch.int32 and found.tolist() == [0, 2, 5, 6, 7, 10, 10, 10]
    assert document_borders(documents, 5).tolist() == [0, 2, 5, 6, 7, 10]
    assert document_borders(torch.full((2, 1), 3), 2).tolist() == [0, 1, 2]
    with pytest.raises(IndexError, match="more than the 4 documents that the plan has room for"):
        document_borders(documents, 4)


@settings(max_examples=25)
@given(st.integers(1, 200), st.integers(0, 9), st.sampled_from([1, 3, 50]), st.integers(0, 3))
def test_borders_cut_rows_into_documents(length: int, seed: int, mean: int, more: int) -> None:
    """The documents between borders, each attended by itself, are those of the mask; the rest are empty."""
    q, k, v = operands(length, length)
    documents = documents_of(2, length, seed, mean)
    most = int((documents.diff(dim=-1) != 0).sum()) + 2 + more
    borders = document_borders(documents, most).tolist()
    assert len(borders) == most + 1 and borders[0] == 0 and borders[most - more :] == [2 * length] * (more + 1)
    flat = [side_by_side(t).transpose(0, 1) for t in (q, k, v)]
    parts = [
        F.scaled_dot_product_attention(*(t[:, a:b] for t in flat), is_causal=True)
        for a, b in itertools.pairwise(borders)
        if b > a
    ]
    found = split_rows(torch.cat(parts, dim=1).transpose(0, 1), 2)
    assert_same(found, F.scaled_dot_product_attention(q, k, v, documents_mask(documents)), [q, k, v])


def test_blocks_stand_in_where_the_kernel_does_not_run() -> None:
    q, k, v = operands(40, 40)
    documents = documents_of(2, 40, 0, 5)
    found = packed_attention(q, k, v, documents, borders=document_borders(documents, 40))
    assert_same(found, F.scaled_dot_product_attention(q, k, v, documents_mask(documents)), [q, k, v])


def test_dropout_in_documents_is_drawn_alike_in_backward() -> None:
    q, k, v = operands(100, 100)
    documents = documents_of(2, 100, 0, 10)
    torch.manual_seed(3)
    found = packed_attention(q, k, v, documents, 0.5)
    torch.manual_seed(3)
    want = F.scaled_dot_product_attention(q, k, v, documents_mask(documents), 0.5)
    assert_same(found, want, [q, k, v])


def test_the_host_reads_no_border() -> None:
    """Neither forward nor backward needs a value: the host would wait for the GPU that has it."""
    with FakeTensorMode():  # it refuses to tell values
        q, k, v = (torch.empty(2, 2, 700, 8, requires_grad=True) for _ in range(3))
        packed_attention(q, k, v, torch.empty(2, 700, dtype=torch.long)).sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape


@pytest.mark.parametrize("is_packed", [False, True])
def test_memory_is_linear(is_packed: bool) -> None:
    """Backward keeps no tensor but query, key and value; the largest tensor that lives has a block's rows."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            sizes = [t.untyped_storage().nbytes() // t.itemsize for t in tree_leaves(out) if isinstance(t, Tensor)]
            self.numel = max(self.numel, *sizes, 0)
            return out

    q, k, v = (torch.randn(1, 1, 4096, 8, requires_grad=True) for _ in range(3))
    with Largest() as largest:
        if is_packed:
            packed_attention(q, k, v, documents_of(1, 4096, 0, 300)).sum().backward()
        else:
            window_attention(q, k, v, 63, 0).sum().backward()
    assert largest.numel <= (4096 * 512 if is_packed else 4096 * 8 + 128 * 256)


def test_autocast_lowers_as_for_torchs_attention() -> None:
    q, k, v = (t.float() for t in operands(200, 200))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = window_attention(q, k, v, 15, 0)
        want = F.scaled_dot_product_attention(q, k, v, window_mask(200, 200, 15, 0))
    assert found.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(found, want, rtol=0, atol=2**-6)  # two units of bf16 below 2


@pytest.mark.parametrize("only", [0, 1, 2])
def test_operands_without_gradient(only: int) -> None:
    given = [t.detach().requires_grad_(i == only) for i, t in enumerate(operands(150, 150))]
    found = window_attention(*given, 5, 3)
    want = F.scaled_dot_product_attention(*given, window_mask(150, 150, 5, 3))
    assert_same(found, want, [given[only]])
