"""Scopes carry dotted names that hold numbers, as the user's own modules do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.runtime.modules import Scope, Stage


class Numbered(Stage):
    def __init__(self) -> None:
        super().__init__()
        self.h = Scope()
        for i in range(3, 5):
            self.h[i] = Scope({"mlp": nn.Linear(2, 3)})
        self.h[3].scale = nn.Parameter(torch.ones(2))
        self.h["a-b"] = nn.Parameter(torch.ones(1))


def test_names_are_the_user_s() -> None:
    names = ["h.a-b", "h.3.scale", "h.3.mlp.weight", "h.3.mlp.bias", "h.4.mlp.weight", "h.4.mlp.bias"]
    assert sorted(Numbered().state_dict()) == sorted(names)


def test_members_are_reached_by_index() -> None:
    stage = Numbered()
    assert stage.h[3].mlp is stage.get_submodule("h.3.mlp")
    assert stage.h["a-b"].shape == (1,)
    assert len(stage.h) == 2
    assert list(stage.h) == [stage.h[3], stage.h[4]]


def test_an_unknown_member_lists_the_known() -> None:
    with pytest.raises(KeyError, match=r"no member '7'; there are 3, 4, a-b"):
        Numbered().h[7]


def test_modes_reach_every_member() -> None:
    stage = Numbered().eval()
    assert not stage.h[4].mlp.training


def test_a_stage_is_where_its_tensors_are() -> None:
    with torch.device("meta"):
        assert Numbered().device == torch.device("meta")
    assert Stage().device == torch.device("cpu")
