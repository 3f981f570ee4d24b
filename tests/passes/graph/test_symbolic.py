"""Costs in b and s against costs measured on static graphs of other sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from penstock.compiler.capture.trace import trace
from penstock.ir.errors import PassError
from penstock.passes.graph.coarsen import Coarsen
from penstock.passes.graph.opgraph import OpGraph
from penstock.passes.graph.symbolic import QUANTITIES, B, S, SymbolicCost, annotate_costs
from penstock.tests.passes.running import apply, draft_of
from penstock.tests.zoo import token_batch, zoo

TRACED = (2, 12)


def batch_of(name: str, b: int, s: int) -> dict[str, Tensor]:
    batch = token_batch(b, s)
    return {**batch, "labels": torch.zeros(b, dtype=torch.long)} if name == "bert" else batch


def num_bytes(nodes: Iterable[fx.Node]) -> int:
    return sum(node.meta["val"].numel() * node.meta["val"].element_size() for node in nodes)


@functools.cache
def symbolic(name: str) -> tuple[nn.Module, OpGraph, dict[str, SymbolicCost]]:
    model, _ = zoo()[name](dropout=0.0)
    graph = trace(model, batch_of(name, *TRACED), dynamic=True)
    return model, graph, annotate_costs(graph)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3, 8), (5, 32)])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_expressions_give_what_a_static_graph_measures(name: str, sizes: tuple[int, int]) -> None:
    model, graph, costs = symbolic(name)
    draft = apply(draft_of(trace(model, batch_of(name, *sizes))), Coarsen())
    by_name: dict[str, Any] = {n.meta["block"]: n.meta for n in graph.nodes if "block" in n.meta}
    assert list(by_name) == [block.name for block in draft.blocks]
    for block in draft.blocks:
        cost = by_name[block.name]["block_cost"]
        assert cost is costs[by_name[block.name]["block_hash"]]
        found = cost.at(*sizes)
        of_blocks = {node for other in draft.blocks for node in other.nodes}
        sent = [n for n in block.outputs if any(user in of_blocks for user in n.users)]
        assert found == {
            **{q: int(getattr(block.cost, q)) for q in QUANTITIES},
            "param_bytes": block.param_bytes,
            "input_bytes": num_bytes(node for node in block.inputs if node in of_blocks),
            "output_bytes": num_bytes(sent),
        }


def test_attention_is_quadratic_in_the_sequence_and_all_is_linear_in_the_batch() -> None:
    layer = next(c for h, c in symbolic("gpt2")[2].items() if c.forward_flops.has(S**2))
    width = 32
    assert layer.forward_flops.coeff(B * S**2) == 4 * width  # scores, and their product with the values
    assert layer.forward_flops.coeff(B * S) == 2 * 12 * width**2
    assert layer.kept_bytes.coeff(B * S**2) == 4  # the mask in fp32; fused attention keeps no scores
    assert (
        layer.input_bytes == layer.output_bytes == 4 * width * B * S
    )  # the hidden state; the mask belongs to no block
    for cost in symbolic("gpt2")[2].values():
        for value in (cost.forward_flops, cost.kept_bytes):
            assert value.as_poly(B, S).degree(B) <= 1


def test_equal_layers_share_one_expression() -> None:
    _, graph, costs = symbolic("gpt2")
    hashes = {n.meta["block"]: n.meta["block_hash"] for n in graph.nodes if "block" in n.meta}
    assert hashes["transformer.h.0"] == hashes["transformer.h.1"]
    assert len(costs) == len(hashes) - 1


class Odd(nn.Module):
    def __init__(self, power: int):
        super().__init__()
        self.inner, self.power = nn.Linear(4, 4), power

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        for _ in range(self.power):
            h = h.unsqueeze(1) + h.unsqueeze(2)
        return h.sum()


def test_what_is_no_such_polynomial_is_refused() -> None:
    """Every step of this model squares the sequence once more."""
    x = {"x": torch.zeros(2, 6, 4)}
    assert annotate_costs(trace(Odd(1), x, dynamic=True))
    with pytest.raises(PassError, match=r"of block 'inner' is no polynomial of degree 1 in b and 2 in s: .* measured"):
        annotate_costs(trace(Odd(2), x, dynamic=True))


def test_graphs_without_the_two_symbols_are_refused() -> None:
    with pytest.raises(PassError, match="traced with dynamic=True; this one has fixed sizes"):
        annotate_costs(trace(Odd(1), {"x": torch.zeros(2, 6, 4)}))
    with pytest.raises(PassError, match="traced with length 3; at least 4"):
        annotate_costs(trace(Odd(1), {"x": torch.zeros(2, 3, 4)}, dynamic=True))


def test_a_model_without_a_sequence_is_linear_in_its_batch() -> None:
    model, batch = zoo()["mlp"]()
    costs = annotate_costs(trace(model, batch, dynamic=True))
    assert all(not cost.forward_flops.has(S) for cost in costs.values())
    assert sum(cost.at(b=6)["forward_flops"] for cost in costs.values()) == 6 * 2 * (8 * 16 + 16 * 4)
