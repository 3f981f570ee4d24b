"""Whether there is anything to train: the loss must be a real number that a trained parameter reaches.

In: the op graph. Out: nothing, or a CaptureError that says what the loss is instead, and where its gradient ends.
"""

from __future__ import annotations

import torch
from torch import fx

from ...ir.errors import CaptureError
from ..dataflow import Dataflow
from ..opgraph import OpGraph


def require_gradient(graph: OpGraph) -> None:
    """Raises CaptureError for a loss from which no gradient flows to a trained parameter."""
    node = graph.outputs["loss"]
    loss = node.meta["val"]
    if not loss.is_floating_point():
        kind = str(loss.dtype).removeprefix("torch.")
        remedy = "take its real part or its magnitude" if loss.is_complex() else "a loss is a floating-point number"
        raise CaptureError(f"{_place(node)}the loss is {kind}, which has no gradient: {remedy}")
    ancestors = _Ancestors(graph)
    if any(ancestors.trains(n) and ancestors.has_gradient(n) for n in ancestors.find(node, alive=True)):
        return
    made = ancestors.find(node, alive=False)
    cut = next((n for n in reversed(graph.nodes) if n in made and ancestors.cuts(n)), None)
    if cut is None:
        raise CaptureError(
            f"{_place(node)}the loss has no gradient: no trained parameter reaches it; it is a constant, or made of "
            "inputs and frozen parameters alone. Compute it from the model's output, or call requires_grad_(True) on "
            "what is to be trained"
        )
    why = "under torch.no_grad()" if cut.meta["no_grad"] else "detach(), or an operation that has no gradient"
    raise CaptureError(
        f"{_place(cut)}the loss has no gradient: this line cuts it off from the trained parameters ({why})"
    )


class _Ancestors:
    """The nodes that a node is made of. What is written in place into a value, or a view of it, belongs to it."""

    def __init__(self, graph: OpGraph):
        self.graph, self.flow = graph, Dataflow(graph.nodes)

    def find(self, node: fx.Node, alive: bool) -> set[fx.Node]:
        """The node and its ancestors; `alive`: only those from which a gradient flows to it."""
        ends = {n for n in self.graph.nodes if n.op != "output" and not self.has_gradient(n)} if alive else ()
        return self.flow.ancestors([node], ends=ends)

    def has_gradient(self, node: fx.Node) -> bool:
        """Whether the node's value has one; a write in place has none of its own."""
        return node.meta["val"] is None or _has_gradient(node.meta["val"])

    def trains(self, node: fx.Node) -> bool:
        return any(p.requires_grad for p in self.graph.node_parameters(node).values())

    def cuts(self, node: fx.Node) -> bool:
        """Whether a gradient that the node's operands have ends here."""
        operands = any(_has_gradient(operand.meta["val"]) for operand in node.all_input_nodes)
        return not self.has_gradient(node) and (operands or self.trains(node))


def _has_gradient(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, (tuple, list)):
        return any(map(_has_gradient, value))
    return isinstance(value, dict) and any(map(_has_gradient, value.values()))


def _place(node: fx.Node) -> str:
    return f"{node.meta['source']}\n  " if node.meta.get("source") else ""
