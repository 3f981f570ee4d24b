"""Ancestors, descendants and dead nodes of a graph, also through memory."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.dataflow import Dataflow
from penstock.graph.edit import copy_graph, erase, read_instead, replace_all, replace_uses
from penstock.graph.opgraph import OpGraph
from penstock.ir.calls import call_name
from penstock.ir.edges import edges


class Written(nn.Module):
    """Writes a view of a value in place, and reads the value afterwards; a dead value is written, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        h = self.layer(x)
        h.view(-1).mul_(scale.mean())
        self.steps.add_(1.0)
        dead = x.exp()
        dead.neg_()
        return h.sin().sum()


def graph_with_writes() -> tuple[OpGraph, dict[str, fx.Node]]:
    """The graph, and its nodes by the names of their calls."""
    graph = trace(Written(), {"x": torch.zeros(2, 4), "scale": torch.zeros(2)})
    return graph, {call_name(node) or str(node.target): node for node in graph.nodes}


def test_a_value_is_made_of_what_is_written_into_it() -> None:
    graph, nodes = graph_with_writes()
    flow = Dataflow(graph.nodes)
    ancestors = flow.ancestors([nodes["sin"]])
    assert {nodes["mul_"], nodes["mean"], nodes["scale"], nodes["layer"], nodes["x"]} <= ancestors
    assert nodes["sum"] not in ancestors and nodes["add_"] not in ancestors
    assert flow.writers(nodes["layer"]) == flow.writers(nodes["view"]) == [nodes["mul_"]]
    assert nodes["mean"] not in flow.ancestors([nodes["sin"]], ends=[nodes["mul_"]])


def test_what_reads_a_written_value_depends_on_what_was_written() -> None:
    graph, nodes = graph_with_writes()
    descendants = Dataflow(graph.nodes).descendants([nodes["scale"]])
    assert {nodes["mean"], nodes["mul_"], nodes["layer"], nodes["sin"], nodes["sum"]} <= descendants
    assert nodes["x"] not in descendants and nodes["add_"] not in descendants


def test_a_write_that_nothing_reads_is_dead_and_one_into_a_buffer_is_not() -> None:
    graph, nodes = graph_with_writes()
    lost, write = nodes["exp"], nodes["neg_"]
    flow = Dataflow(graph.nodes)
    assert flow.dead() == {lost, write}
    assert not flow.dead(kept=[write]) and not flow.dead(writes=True)


def test_a_node_is_replaced_in_all_edges() -> None:
    """Also in evaluation, where it is written, and where its storage is shared."""
    graph, nodes = graph_with_writes()
    old, view = nodes["layer"], nodes["view"]
    with graph.graph.inserting_after(old):
        new = graph.graph.call_function(torch.clone, (old,))
    new.meta = {**old.meta, "mutates": (), "alias_of": None}
    view.meta.update(eval_args=(old, 8), eval_kwargs={})
    replace_uses(graph, {old: new})
    assert [node for node in graph.nodes if old in edges(node)] == [new], "what it is made of keeps the old one"
    assert view.meta["alias_of"] is new and view.meta["eval_args"] == (new, 8)
    read_instead(new, {old: nodes["x"]})
    erase(graph, [old])
    assert not any(old in edges(node) for node in graph.nodes)
    copy = copy_graph(graph)
    assert {n for node in copy.nodes for n in edges(node)} <= set(copy.nodes)


def test_a_view_owns_the_storage_of_an_erased_owner() -> None:
    graph, nodes = graph_with_writes()
    view, write = nodes["view"], nodes["mul_"]
    for node in list(nodes["layer"].users):
        read_instead(node, {nodes["layer"]: nodes["x"]} if node is not view else {})
    view.args, view.meta["alias_of"] = (nodes["x"], 8), nodes["layer"]
    erase(graph, [nodes["layer"]])
    assert view.meta["alias_of"] is None and Dataflow(graph.nodes).writers(view) == [write]


def test_outputs_follow_a_replaced_node() -> None:
    graph, nodes = graph_with_writes()
    with graph.graph.inserting_after(nodes["sum"]):
        new = graph.graph.call_function(torch.sum, (nodes["sin"],))
    new.meta = dict(nodes["sum"].meta)
    replace_all(graph, {nodes["sum"]: new})
    assert graph.outputs["loss"] is new and graph.graph.output_node().all_input_nodes == [new]
