"""Routes: which tokens of which member of a team go to the experts of which other one.

A member's layer of experts has rows, each a token for one of its experts, sorted by expert; each token has equally
many. The routes [tokens of all members, experts of each], int32, say to which experts each token goes. A token goes to
a member once, however many of its experts are there, and one row comes back, the sum over these. The member makes a row
for each of its experts out of a token, by expert, of each expert in the order of members and tokens.

How many rows arrive is known only while a step runs. In stages tensors have room for the rows of all tokens of all
members, so that shapes do not depend on the routing, and zeros follow the rows that came.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


def rows_of_tokens(tokens: Tensor) -> Tensor:
    """The rows of each token, one token's after the other's. `tokens`: the token of each row."""
    return tokens.argsort(stable=True)


def row_numbers(rows: Tensor) -> Tensor:
    """`rows_of_tokens` where each row counts as a token of its own."""
    return torch.arange(rows.shape[0], device=rows.device)


def tokens_to_send(tokens: Tensor) -> Tensor:
    """A copy of what goes to experts, made in the stage that makes routes."""
    return tokens.clone()


def token_experts(offsets: Tensor, rows: Tensor, each: int) -> Tensor:
    """A member's routes, [tokens, each]. `rows`: those of each token; `offsets`: where each expert's end."""
    return torch.searchsorted(offsets.to(rows.dtype), rows, right=True, out_int32=True).view(-1, each)


def token_shares(shares: Tensor, rows: Tensor, each: int) -> Tensor:
    """Values of rows [rows, 1] as values of tokens, [tokens, each]."""
    return shares.flatten().index_select(0, rows).view(-1, each)


def arrived_offsets(routes: Tensor, member: Tensor, members: int, experts: int) -> Tensor:
    """The end of the rows of each of a member's experts. `experts`: the number of all; `member`: its number, [1]."""
    counts = routes.new_zeros(experts).scatter_add(0, routes.flatten().long(), torch.ones_like(routes.flatten()))
    return counts.view(members, -1).index_select(0, member).squeeze(0).cumsum(0, dtype=torch.int32)


def arrived_shares(shares: Tensor, routes: Tensor, member: Tensor, members: int, experts: int) -> Tensor:
    """Of the numbers that came with each row's token, [rows, experts of each], that of the row's expert, [rows, 1]."""
    return shares.gather(1, (arrived_places(routes, member, members, experts) % routes.shape[1]).unsqueeze(1))


def weighted(rows: Tensor, shares: Tensor) -> Tensor:
    """The rows [rows, width] times the shares [rows, 1] of their experts in the tokens' results, in the rows' type."""
    return (rows * shares).to(rows.dtype)


def arrived_places(routes: Tensor, member: Tensor | int, members: int, experts: int) -> Tensor:
    """The places in the flat routes of a member's experts, in the order of its rows; then those of others."""
    own = experts // members
    expert = routes.flatten() - member * own
    return torch.where((expert >= 0) & (expert < own), expert, own).argsort(stable=True)


class Arrivals:
    """The tokens that come to one member, and the rows that it makes of them. `routes`: in host memory."""

    def __init__(self, routes: Tensor, member: int, members: int, experts: int):
        here = routes // (experts // members) == member
        self.room, self.each = routes.numel(), routes.shape[1]
        self.comes = here.any(1)  # for each token of all members
        self.comes_from = self.comes.view(members, -1)
        self.counts = [int(count) for count in self.comes_from.sum(1)]  # the number of tokens from each member
        self.places = arrived_places(routes, member, members, experts)[: int(here.sum())]

    @property
    def num_tokens(self) -> int:
        """Of each member."""
        return self.comes_from.shape[1]

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each row, counted among those that come."""
        return (self.comes.cumsum(0) - 1)[self.places // self.each]

    def tokens_from(self, member: int) -> Tensor:
        """The numbers of the tokens that come from a member, among its own."""
        return self.comes_from[member].nonzero().squeeze(1)

    def sums(self, rows: Tensor) -> Tensor:
        """The sum over the rows of each token that came, in the order of the token's experts."""
        total, turns = SumsOfTokens(rows, sum(self.counts)), self.places % self.each
        for turn in range(self.each):
            which = (turns == turn).nonzero().squeeze(1)
            total.add(self.tokens[which], rows.index_select(0, which.to(rows.device)))
        return total.whole()


class SumsOfTokens:
    """The sums of rows of tokens. They are added up in fp32, if their type is smaller, and in the order in which they
    are given, so that they are the same in every run. `like`: some rows."""

    def __init__(self, like: Tensor, num_tokens: int):
        self.dtype = like.dtype
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.total = like.new_zeros((num_tokens, *like.shape[1:]), dtype=dtype)

    def add(self, tokens: Tensor, rows: Tensor) -> None:
        """Add a row to each of some tokens, none of them twice."""
        self.total.index_add_(0, tokens.to(rows.device), rows.to(self.total.dtype))

    def whole(self) -> Tensor:
        return self.total.to(self.dtype)
