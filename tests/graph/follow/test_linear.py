"""Linear values and reductions, whatever functions make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from penstock.compiler.batches.shape import micro_batch_spec
from penstock.compiler.loss import capture
from penstock.graph.dataflow import Dataflow
from penstock.graph.follow.linear import LinearPath, is_linear, is_quotient, reduction_of
from penstock.graph.opgraph import OpGraph
from penstock.ir.calls import call_name

Function = Callable[..., Any]
X, Y = torch.zeros(2, 3), torch.zeros(2, 3)


class Applied(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(3, 3)
        self.register_buffer("table", torch.zeros(2, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layer(x).mean() + self.function(x, y, self.table).sum()


def graph_of(function: Function) -> tuple[OpGraph, fx.Node]:
    """The graph of a model that calls a function of two inputs and a table, and the function's node."""
    graph = capture(Applied(function), micro_batch_spec({"x": X, "y": Y}, 1))
    node = next(n for n in graph.nodes if n.op == "call_method" and n.target == "sum" and n.args[0].op != "placeholder")
    assert isinstance(node.args[0], fx.Node)
    return graph, node.args[0]


def inputs(graph: OpGraph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


@pytest.mark.parametrize(
    ("function", "of_x", "of_both"),
    [
        (lambda x, y, t: x + y, False, True),
        (lambda x, y, t: x.sub(y, alpha=2), False, True),
        (lambda x, y, t: x * t, True, False),
        (lambda x, y, t: x * y, True, False),
        (lambda x, y, t: x / t, True, False),
        (lambda x, y, t: t / x, False, False),
        (lambda x, y, t: x.div(t, rounding_mode="floor"), False, False),
        (lambda x, y, t: torch.stack([x, y]), False, True),
        (lambda x, y, t: x @ t.T, True, False),
        (lambda x, y, t: F.linear(x, t, t[:, 0]), False, False),
        (lambda x, y, t: torch.where(t > 0, x, 0.0), True, False),
        (lambda x, y, t: x.double().mT[:, None].mean(0), True, False),
        (lambda x, y, t: x.cumsum(1), True, False),
        (lambda x, y, t: x.abs(), False, False),
        (lambda x, y, t: x.int(), False, False),
        (lambda x, y, t: x + 1, False, False),
    ],
)
def test_what_a_value_is_linear_in(function: Function, of_x: bool, of_both: bool) -> None:
    graph, node = graph_of(function)
    x, y = inputs(graph)
    reads_x = x in node.all_input_nodes
    while not reads_x and len(node.all_input_nodes) == 1 and is_linear(graph, node, node.all_input_nodes):
        (node,) = node.all_input_nodes
        reads_x = x in node.all_input_nodes
    assert is_linear(graph, node, [x]) == of_x
    if y in node.all_input_nodes:
        assert is_linear(graph, node, [x, y]) == of_both


def test_a_value_with_an_offset_is_told_from_a_linear_one() -> None:
    for function in (lambda x, y, t: x + 1, lambda x, y, t: x - t, lambda x, y, t: F.linear(x, t, t[:, 0])):
        graph, node = graph_of(function)
        assert is_linear(graph, node, inputs(graph)[:1], offset=True)
        assert not is_linear(graph, node, inputs(graph)[:1])


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x, y, t: x.sum(), "sum"),
        (lambda x, y, t: torch.mean(x), "mean"),
        (lambda x, y, t: x.nansum(), "sum"),
        (lambda x, y, t: torch.dot(x[0], y[0]), "sum"),
        (lambda x, y, t: torch.count_nonzero(x), "sum"),
        (lambda x, y, t: F.mse_loss(x, y), "mean"),
        (lambda x, y, t: F.l1_loss(x, y, reduction="sum"), "sum"),
        (lambda x, y, t: x.max(), ""),
        (lambda x, y, t: x.norm(), ""),
        (lambda x, y, t: x.sum(0), ""),
    ],
)
def test_how_a_value_reduces_a_tensor(function: Function, kind: str) -> None:
    graph, node = graph_of(lambda x, y, t: function(x, y, t)[None])
    (made,) = node.all_input_nodes
    assert reduction_of(graph, made) == kind


def test_quotients() -> None:
    for function in (lambda x, y, t: x / y, lambda x, y, t: torch.true_divide(x, y), lambda x, y, t: x.div(y)):
        assert is_quotient(*graph_of(function))
    for function in (lambda x, y, t: x // y, lambda x, y, t: x * y, lambda x, y, t: x / 2, lambda x, y, t: x / x):
        assert not is_quotient(*graph_of(function))


def test_the_summands_of_a_loss_pass_what_puts_scalars_together() -> None:
    def loss(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        parts = torch.stack([x.mean(), y.norm() * 2]).sum()
        return torch.where(t[0, 0] > 0, parts, 0.0) + x.max()[None].sum() - 3

    graph, _ = graph_of(loss)
    dependent = Dataflow(graph.nodes).descendants(inputs(graph))
    path = LinearPath.to(graph, graph.outputs["loss"], dependent.__contains__)
    assert [call_name(term) for term in path.terms] == ["mean", "mean", "norm", "sum"]
