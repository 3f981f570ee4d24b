"""Attention in blocks that go round a ring: against torch's own, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.runtime.ring_attention import QUERIES, attend_first, attend_next, attention_of
from penstock.runtime.token_parts import among_zeros, own_tokens


def ring(operands: list[Tensor], team: int, is_causal: bool, scale: float | None) -> Tensor:
    """What all members together make, each with its own tokens."""
    tokens, total = operands[0].shape[-2], None
    members = [torch.tensor([number]) for number in range(team)]
    parts = [[own_tokens(t, m, team, 2, tokens, zigzag=is_causal) for t in operands] for m in members]
    for number, member in enumerate(members):
        query = parts[number][0]
        partial = attend_first(*parts[number], is_causal, scale)
        for step in range(1, team):
            _, key, value = parts[(number - step) % team]
            partial = attend_next(partial, query, key, value, member, step, is_causal, scale)
        own = attention_of(partial, query.dtype)
        placed = among_zeros(own, member, team, 2, tokens, zigzag=is_causal)
        total = placed if total is None else total + placed
    assert total is not None
    return total


@pytest.mark.parametrize("team", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("groups", [2, 4])
def test_a_ring_is_attention(team: int, is_causal: bool, groups: int) -> None:
    made = torch.Generator().manual_seed(team)
    shapes = [(2, heads, 24, 6) for heads in (4, groups, groups)]
    operands = [torch.randn(shape, dtype=torch.double, generator=made).requires_grad_() for shape in shapes]
    scale = None if groups == 4 else 0.3
    found = ring(operands, team, is_causal, scale)
    want = F.scaled_dot_product_attention(*operands, is_causal=is_causal, scale=scale, enable_gqa=True)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-13)
    given = torch.randn(want.shape, dtype=torch.double, generator=made)
    for one, other in zip(torch.autograd.grad(found, operands, given), torch.autograd.grad(want, operands, given)):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_more_queries_than_stand_at_once_and_low_precision(is_causal: bool) -> None:
    made = torch.Generator().manual_seed(0)
    operands = [torch.randn(1, 2, 2 * QUERIES + 6, 8, generator=made).bfloat16().requires_grad_() for _ in range(3)]
    found = attention_of(attend_first(*operands, is_causal), torch.bfloat16)
    want = F.scaled_dot_product_attention(*(t.float() for t in operands), is_causal=is_causal)
    torch.testing.assert_close(found.float(), want, rtol=0, atol=2e-2)
    given = torch.randn(want.shape, generator=made)
    own = torch.autograd.grad(found, operands, given.bfloat16())
    for one, other in zip(own, torch.autograd.grad(want, operands, given)):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=4e-2)
