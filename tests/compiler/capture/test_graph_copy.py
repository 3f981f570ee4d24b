"""A copied op graph, which a pass may rewrite: the same step, with nodes of its own."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from zoo import zoo

from penstock.compiler.capture.trace import trace


@pytest.mark.parametrize("name", ["gpt2", "in_place", "wide_resnet"])
def test_a_copy_computes_the_same_and_refers_to_its_own_nodes(name: str) -> None:
    model, batch = zoo()[name](dropout=0.0)
    first = trace(model, batch, tracer="recorder")
    copy = first.copy()
    assert not set(copy.nodes) & set(first.nodes)
    assert torch.equal(copy.module(**batch)["loss"], first.module(**batch)["loss"])
    own, named = set(copy.nodes), []
    for node in copy.nodes:
        fx.map_arg([node.meta.get(key) for key in ("mutates", "alias_of", "eval_args")], named.append)
    assert named and set(named) <= own and set(copy.outputs.values()) <= own
