"""Tokens of a sequence in parts, one for each member of a team: cut from values that every member has, and put back.

A sequence of L tokens is laid out along a dimension so that element i is of token `i // inner % L`. Of N members,
member r has the r-th of N runs of tokens, or in zigzag of 2 N runs the r-th from the front and the r-th from the end:
of causal attention, both have the same work then (Ring Attention in balance, Brandon 2023, striped).
"""

from __future__ import annotations

import torch
from torch import Tensor


def own_tokens(
    value: Tensor, member: Tensor, team: int, dim: int, length: int, inner: int = 1, zigzag: bool = False
) -> Tensor:
    """The tokens of a member. member: [1], its number among `team`; it stays on the device, which no host waits for."""
    runs = _runs(value, dim, team, length, inner, zigzag)
    return runs.index_select(dim + 1, _numbers(member, team, zigzag)).flatten(dim, dim + 2)


def tokens_of_all(value: Tensor, team: int, dim: int, length: int, inner: int = 1, zigzag: bool = False) -> Tensor:
    """The tokens of each member (`own_tokens`), those of one member after those of another along dimension 0."""
    members = torch.arange(team, device=value.device).split(1)
    return torch.cat([own_tokens(value, member, team, dim, length, inner, zigzag) for member in members])


def among_zeros(
    value: Tensor, member: Tensor, team: int, dim: int, length: int, inner: int = 1, zigzag: bool = False
) -> Tensor:
    """A member's tokens in their places of the whole sequence, zeros in those of others: the sum over members has all
    of them."""
    count = 2 * team if zigzag else team
    own = _runs(value, dim, 2 if zigzag else 1, length // team, inner, False)
    shape = list(own.shape)
    shape[dim + 1] = count
    whole = own.new_zeros(shape).index_copy(dim + 1, _numbers(member, team, zigzag), own)
    found: Tensor = whole.flatten(dim, dim + 2)
    return found


def _runs(value: Tensor, dim: int, team: int, length: int, inner: int, zigzag: bool) -> Tensor:
    """The dimension as (outer, runs of tokens, elements of a run)."""
    count = 2 * team if zigzag else team
    size = length // count * inner
    runs: Tensor = value.unflatten(dim, (value.shape[dim] // (length * inner), count, size))
    return runs


def _numbers(member: Tensor, team: int, zigzag: bool) -> Tensor:
    """The runs that a member has."""
    return torch.cat((member, 2 * team - 1 - member)) if zigzag else member
