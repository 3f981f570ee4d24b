"""A copied op graph, which a pass may rewrite: the same step, with nodes of its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx
from zoo import zoo

from penstock.compiler.capture.trace import trace
from penstock.graph.edit import copy_graph


@pytest.mark.parametrize("name", ["gpt2", "in_place", "wide_resnet"])
def test_a_copy_computes_the_same_and_refers_to_its_own_nodes(name: str) -> None:
    model, batch = zoo()[name](dropout=0.0)
    first = trace(model, batch)
    copied, before = copy_graph(first), copy.deepcopy(model.state_dict())
    found = copied.module(**batch)["loss"]
    model.load_state_dict(before)  # a forward writes buffers
    assert torch.equal(found, first.module(**batch)["loss"])
    assert not set(copied.nodes) & set(first.nodes)
    own, named = set(copied.nodes), []
    for node in copied.nodes:
        fx.map_arg([node.meta.get(key) for key in ("mutates", "alias_of", "eval_args")], named.append)
    assert named and set(named) <= own and set(copied.outputs.values()) <= own
