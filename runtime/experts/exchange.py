"""Tokens go to the members of a team that have their experts, and sums of rows come back: an exchange by count.

`arrivals` has what comes to each member, and `own` is the number of this one. `exchange(sent, given, found, taken)`
fills `found` with the rows that members have for this one; `given` and `taken` say how many of `sent` go to each member
and how many of `found` come of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .routes import Arrivals, SumsOfTokens

Trade = Callable[[Tensor, Sequence[int], Tensor, Sequence[int]], None]


def rows_at_experts(tokens: Tensor, arrivals: Sequence[Arrivals], own: int, exchange: Trade) -> Tensor:
    """This member's rows of the tokens of all, by expert, and zeros after them."""
    mine, going = arrivals[own], [each.tokens_from(own) for each in arrivals]
    sent = tokens.index_select(0, torch.cat(going).to(tokens.device))
    arrived = tokens.new_empty((sum(mine.counts), *tokens.shape[1:]))
    exchange(sent, [len(numbers) for numbers in going], arrived, mine.counts)
    whole = tokens.new_zeros((mine.room, *tokens.shape[1:]))
    which = mine.tokens.to(tokens.device)
    torch.index_select(arrived, 0, which, out=whole[: len(which)])
    return whole


def sums_at_tokens(rows: Tensor, arrivals: Sequence[Arrivals], own: int, exchange: Trade) -> Tensor:
    """For each of this member's tokens the sum over the rows that all members have of it."""
    mine, coming = arrivals[own], [each.tokens_from(own) for each in arrivals]
    counts = [len(numbers) for numbers in coming]
    arrived = rows.new_empty((sum(counts), *rows.shape[1:]))
    exchange(mine.sums(rows), mine.counts, arrived, counts)
    total = SumsOfTokens(rows, mine.num_tokens)
    for numbers, part in zip(coming, arrived.split(counts), strict=True):
        total.add(numbers, part)
    return total.whole()


def warm_up_exchange(made_of: Callable[..., Tensor], value: Tensor, routes: Tensor, members: int, experts: int) -> None:
    """Launch what `made_of`, one of the two above, launches for a value, without a message. `routes`: of the shape and
    type that it comes with, in host memory. Many rows and few may take other kernels."""
    few = torch.full_like(routes, experts - 1)
    few[0] = 0
    for tried in (torch.zeros_like(routes), few):
        arrivals = [Arrivals(tried, member, members, experts) for member in range(members)]
        made_of(value, arrivals, 0, lambda *_: None)
