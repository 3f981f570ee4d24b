"""Placements: each exchange keeps the value that members have together, and backward the gradient that they have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.graph.divide.exchanges import EXCHANGES, PLACEMENTS
from penstock.graph.divide.placements import OPS, Has, Placement, ops_between

TEAM, ROWS, COLUMNS = 3, 6, 9
# The results of an op on the values of all members: parts of dimension 0, after `all_to_all` of dimension 1.
MEANINGS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "": lambda values: values,
    "own_part": lambda values: [value.chunk(TEAM)[i] for i, value in enumerate(values)],
    "gather_parts": lambda values: [torch.cat(values)] * TEAM,
    "all_to_all": lambda values: [torch.cat([v.chunk(TEAM, 1)[i] for v in values]) for i in range(TEAM)],
    "sum_parts": lambda values: [sum(values, torch.zeros(()))] * TEAM,
    "scatter_sum": lambda values: [*sum(values, torch.zeros(())).chunk(TEAM)],
}


def shares_of(value: Tensor, has: Has) -> list[Tensor]:
    """Each member's share of a value."""
    if has is Has.PART:
        return [*value.chunk(TEAM)]
    summands = [torch.randn(value.shape, dtype=value.dtype) for _ in range(TEAM - 1)]
    return [value] * TEAM if has is Has.WHOLE else [*summands, value - sum(summands)]


def together(values: list[Tensor], has: Has, dim: int) -> Tensor:
    """The value of which members have these."""
    if has is Has.WHOLE:
        assert all(torch.equal(value, values[0]) for value in values)
    return {Has.WHOLE: values[0], Has.PART: torch.cat(values, dim), Has.SUMMAND: sum(values, torch.zeros(()))}[has]


@pytest.mark.parametrize("function", PLACEMENTS, ids=lambda function: function.__name__)
def test_an_exchange_keeps_the_value_and_its_gradient(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    now, needed = PLACEMENTS[function]
    op, back = EXCHANGES[function].op, EXCHANGES[function].back
    value = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    for name, before, after in ((op, now.forward, needed.forward), (back, needed.backward, now.backward)):
        dim = 1 if name == "all_to_all" else 0
        found = together(MEANINGS[name](shares_of(value, before)), after, dim)
        # A sum of three addends is off by two roundings of 2^-53 of numbers below 10.
        torch.testing.assert_close(found, value, rtol=0, atol=2e-15 * 10)


def test_five_ops_make_every_exchange() -> None:
    """Each of a value or of a gradient; where a gradient stays a summand there is none."""
    used = {op for pair in PLACEMENTS.values() for op in ops_between(*pair)} - {""}
    assert used == {*OPS.values()} and len(OPS) == 5
    with pytest.raises(KeyError):
        ops_between(Placement.SHARED, Placement.PART)  # members' own gradients of a whole value are no part of it
