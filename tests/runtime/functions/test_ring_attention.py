"""Attention in blocks that go round a ring: against torch's own, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.runtime.functions.ring_attention import QUERIES, attend_block, attention_of, visible_steps, with_gradients
from penstock.runtime.functions.token_parts import among_zeros, own_tokens
from penstock.tests.shown_elsewhere import slow_but, slow_rows_but

TOKENS = 24
WINDOWS = [(None, None), (None, 0), (3, 0), (9, 0), (2, 3), (0, 0), (40, 0)]
LAYOUTS = [(1, False), (2, True), (3, False), (4, True)]  # the number of members, and whether they have two runs each
MASKS = ("none", "padding", "numbers", "documents", "any", "hidden by numbers")


class Handed(torch.autograd.Function):
    """Hands the gradient of a partial attention to the one before it, as programs do."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, now: Tensor) -> Tensor:
        return now.view_as(now)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], grads[0]


def ring(operands: list[Tensor], team: int, zigzag: bool, again: bool, **options: Any) -> Tensor:
    """The result of all members together, each with its own tokens. `again`: gradients are those of a
    rematerialisation."""
    tokens = operands[0].shape[-2]
    wholes = []
    members = [torch.tensor([number]) for number in range(team)]
    parts = [[own_tokens(t, m, team, 2, tokens, zigzag=zigzag) for t in operands] for m in members]
    seen = visible_steps(tokens // team, team, zigzag, options["before"], options["after"])
    for number, member in enumerate(members):
        query, partial = parts[number][0], None
        for step in seen:
            _, key, value = parts[(number - step) % team]
            given = (query, key, value, member, step, team, zigzag)
            block = attend_block(partial, *given, **options)
            before, partial = partial, with_gradients(block, *given, **options)
            if again:
                stand_in = with_gradients(None, *given, **options)
                partial = Handed.apply(stand_in, block)
            partial = partial if before is None else Handed.apply(before, partial)
        own = attention_of(partial, query.dtype)
        wholes.append(among_zeros(own, member, team, 2, tokens, zigzag=zigzag))
    return torch.stack(wholes).sum(0)


def masks(kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """The arguments that hide keys, and the same as numbers to add [2, heads or 1, tokens, tokens]."""
    made = torch.Generator().manual_seed(2)
    square = (2, 1, TOKENS, TOKENS)
    if kind == "padding":
        mask = torch.ones(2, 1, 1, TOKENS, dtype=torch.bool)
        mask[0, ..., :5], mask[1, ..., 20:] = False, False
    elif kind == "any":
        mask = torch.rand(square, generator=made) > 0.3
        mask[0, 0, 4] = False  # a query sees no key
    elif kind == "documents":
        numbers = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [5] * 12 + [6] * 12])
        return {"documents": numbers}, mask_of(numbers[:, None, :, None] == numbers[:, None, None])
    elif kind == "numbers":
        mask = torch.randn(1, 4, TOKENS, TOKENS, dtype=torch.double, generator=made)
        return {"mask": mask}, mask
    elif kind == "hidden by numbers":  # a query sees all keys alike
        mask = torch.zeros(square, dtype=torch.double)
        mask[:, :, 3] = mask[:, :, 4:9, :6] = torch.finfo(torch.double).min
        return {"mask": mask}, mask
    else:
        return {}, torch.zeros(square, dtype=torch.double)
    return {"mask": mask}, mask_of(mask)


def mask_of(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, dtype=torch.double).masked_fill(~seen, float("-inf"))


@pytest.mark.parametrize("kind", slow_but(("padding", "documents", "any", "hidden by numbers"), MASKS))
@pytest.mark.parametrize(("team", "zigzag"), slow_rows_but([(3, False), (4, True)], LAYOUTS))
def test_a_ring_is_attention(team: int, zigzag: bool, kind: str) -> None:
    """Of queries that see no key, too, of which torch's makes 0."""
    made = torch.Generator().manual_seed(team)
    options, added = masks(kind)
    place = torch.arange(TOKENS)
    for number, (before, after) in enumerate(WINDOWS if kind != "hidden by numbers" else WINDOWS[:1]):
        groups, scale = ((2, None), (4, 0.3))[number % 2]
        shapes = [(2, heads, TOKENS, 6) for heads in (4, groups, groups)]
        operands = [torch.randn(shape, dtype=torch.double, generator=made).requires_grad_() for shape in shapes]
        found = ring(operands, team, zigzag, bool(number % 2), before=before, after=after, scale=scale, **options)
        apart = place[:, None] - place
        seen = apart <= (TOKENS if before is None else before)
        seen &= apart >= -(TOKENS if after is None else after)
        with sdpa_kernel(SDPBackend.MATH):
            want = F.scaled_dot_product_attention(
                *operands, attn_mask=added + mask_of(seen), scale=scale, enable_gqa=True
            )
        torch.testing.assert_close(found, want, rtol=0, atol=1e-13)
        given = torch.randn(want.shape, dtype=torch.double, generator=made)
        for one, other in zip(torch.autograd.grad(found, operands, given), torch.autograd.grad(want, operands, given)):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ((24, 4, False, None, None), [0, 1, 2, 3]),
        ((24, 4, True, None, 0), [0, 1, 2, 3]),
        ((24, 4, False, 3, 0), [0, 1]),  # no further than one member
        ((8, 8, False, 9, 0), [0, 1, 2]),
        ((8, 8, False, 1, 1), [0, 1, 7]),  # both neighbours
        ((8, 8, True, 4, 0), [0, 1, 7]),  # the second runs of tokens come from the other side
    ],
)
def test_blocks_outside_of_a_window_are_left_out(given: Any, steps: list[int]) -> None:
    assert visible_steps(*given) == steps


@pytest.mark.parametrize("after", [0, None])
def test_more_queries_than_stand_at_once_and_low_precision(after: int | None) -> None:
    made = torch.Generator().manual_seed(0)
    operands = [torch.randn(1, 2, 2 * QUERIES + 6, 8, generator=made).bfloat16().requires_grad_() for _ in range(3)]
    found = ring(operands, 1, False, False, before=None, after=after)
    want = F.scaled_dot_product_attention(*(t.float() for t in operands), is_causal=after == 0)
    torch.testing.assert_close(found.float(), want, rtol=0, atol=2e-2)
    given = torch.randn(want.shape, generator=made)
    own = torch.autograd.grad(found, operands, given.bfloat16())
    for one, other in zip(own, torch.autograd.grad(want, operands, given)):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=4e-2)
