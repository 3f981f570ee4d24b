"""Parts of tokens: what members have, one after the other, is what each has."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.functions import own_tokens, tokens_of_all


@pytest.mark.parametrize(("dim", "inner", "zigzag"), [(0, 1, False), (1, 1, False), (1, 1, True), (0, 3, False)])
def test_tokens_of_all_members_are_those_of_each(dim: int, inner: int, zigzag: bool) -> None:
    team, length = 2, 8
    value = torch.arange(2 * length * inner * 5).view(-1, 5) if dim == 0 else torch.arange(4 * length).view(4, -1)
    own = [own_tokens(value, torch.tensor([i]), team, dim, length, inner, zigzag) for i in range(team)]
    assert not torch.equal(own[0], own[1])
    assert torch.equal(tokens_of_all(value, team, dim, length, inner, zigzag), torch.cat(own))
