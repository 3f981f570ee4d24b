"""Heads followed by a cross entropy: where a step makes logits only to compare them with labels.

In: an op graph. Out: for each cross entropy of the graph a `HeadLoss` with all that computes it, from the head's
operands to the call, or `WholeLogits` with the reason why its logits must be whole. Passes that compute the same
without whole logits replace `HeadLoss.loss`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...ir.calls import call_name
from ...ir.edges import storage_root, written_roots
from ..dataflow import Dataflow
from ..follow.linear import effect_of, is_linear
from ..kernels.call_node import call_node
from ..operators.calls import copied_operand, operators, unknown_call
from ..operators.record import Elements
from ..operators.states import ByRow
from ..opgraph import OpGraph
from .class_loss import ClassLoss, class_loss

NodeOrName = fx.Node | str  # a tensor: its node, or its dotted name where a leaf module holds it


@dataclass(frozen=True)
class HeadLoss:
    """One head, and the cross entropy of its logits.

    The logits are `cap * tanh(scale * product)`, or without a cap `scale * product`. `moves` are the calls between
    product and loss that choose or reshape rows: they may act on `hidden` instead, as they leave the classes alone.
    """

    hidden: fx.Node
    weight: NodeOrName  # classes x width
    bias: NodeOrName | None
    product: fx.Node
    between: tuple[fx.Node, ...]  # the logits' other nodes, in order
    moves: tuple[fx.Node, ...]
    loss: fx.Node
    labels: fx.Node
    class_weight: NodeOrName | None
    ignore_index: int
    label_smoothing: float
    reduction: str
    scale: float = 1.0
    cap: float | None = None
    outputs: tuple[str, ...] = ()  # the model's outputs that are logits

    @property
    def num_classes(self) -> int:
        return int(self.product.meta["val"].shape[-1])

    @property
    def num_tokens(self) -> int:
        return math.prod(self.labels.meta["val"].shape)

    @property
    def logits_dtype(self) -> torch.dtype:
        """The dtype in which the head multiplies."""
        dtype: torch.dtype = self.product.meta["val"].dtype
        return dtype

    @property
    def loss_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.loss.meta["val"].dtype
        return dtype

    @property
    def logits_bytes(self) -> int:
        """Bytes of all logits together, in the dtype of the product."""
        return self.num_tokens * self.num_classes * self.logits_dtype.itemsize


@dataclass(frozen=True)
class WholeLogits:
    """A cross entropy whose logits are whole, and why."""

    loss: fx.Node
    reason: str


class _Whole(Exception):
    """The reason why logits are whole."""


def head_losses(graph: OpGraph) -> list[HeadLoss | WholeLogits]:
    """All cross entropies that gradients come from, or that the loss reads without one, as those of a reference in
    preference training, in order."""
    found: list[HeadLoss | WholeLogits] = []
    read = Dataflow(graph.nodes).ancestors([graph.outputs["loss"]])
    for node in graph.nodes:
        call = class_loss(graph, node)
        if call is not None and (node.meta["val"].requires_grad or node in read):
            try:
                found.append(_Finder(graph, node, call).find())
            except _Whole as why:
                found.append(WholeLogits(node, str(why)))
    return found


@dataclass
class _Finder:
    graph: OpGraph
    loss: fx.Node
    call: ClassLoss
    between: list[fx.Node] = field(default_factory=list)  # from the loss back to the product
    moves: list[fx.Node] = field(default_factory=list)
    factors: list[float] = field(default_factory=lambda: [1.0])  # after each tanh, from the loss back

    def find(self) -> HeadLoss:
        given = self.call.arguments
        labels, logits = given["target"], given["input"]
        self._check_call(labels)
        value = self._classes_last(logits)
        while (operands := product_of(self.graph, value)) is None:
            value = self._step_back(value)
        hidden, weight, bias = operands
        between, moves = tuple(reversed(self.between)), tuple(reversed(self.moves))
        if len(self.factors) > 2:
            raise _Whole("several tanh are between the head and the loss")
        scale, cap = self.factors[-1], self.factors[0] if len(self.factors) == 2 else None
        outputs = self._outputs((value, *between))
        self._check_writes(value, (hidden, weight, bias, labels))
        return HeadLoss(
            hidden, weight, bias, value, between, moves, self.loss, labels, self.call.weight or given["weight"],
            int(given["ignore_index"]), float(given["label_smoothing"]), self.call.reduction, scale, cap, outputs,
        )  # fmt: skip

    def _check_call(self, labels: Any) -> None:
        if self.call.function is not F.cross_entropy:
            raise _Whole("it is a negative log-likelihood of probabilities that the model makes")
        if "eval_args" in self.loss.meta:
            raise _Whole("its arguments differ in evaluation")
        if not isinstance(labels, fx.Node) or labels.meta["val"].dtype != torch.int64:
            raise _Whole("its targets are not numbers of classes")

    def _classes_last(self, logits: fx.Node) -> fx.Node:
        """The logits with classes in their last dimension: without the transposition that the loss asked for."""
        rank = logits.meta["val"].dim()
        if rank <= 2:
            return logits
        axes = [0, rank - 1, *range(1, rank - 1)]
        if _axes(self.graph, logits) != axes or "eval_args" in logits.meta:
            raise _Whole("its classes are not the last dimension of a product")
        self.between.append(logits)
        (before,) = logits.all_input_nodes
        return before

    def _step_back(self, node: fx.Node) -> fx.Node:
        """Note what a node between the head and the loss does, and go to what it reads."""
        name, before = call_name(node), next(iter(node.all_input_nodes), None)
        if before is None or not isinstance(before.meta["val"], torch.Tensor) or "eval_args" in node.meta:
            raise _Whole(f"its logits come from {name or node.name}, which is no head")
        is_copy = copied_operand(self.graph, node, Elements.SAME) is before
        if is_copy and node.meta["val"].is_floating_point():
            pass
        elif (factor := _factor(self.graph, node)) is not None:
            self.factors[-1] *= factor
        elif name == "tanh":
            self.factors.append(1.0)
        elif _moves_rows(self.graph, node, before):
            self.moves.append(node)
        else:
            raise _Whole(unknown_call(self.graph, node) or f"{name or node.name} is between the head and the loss")
        self.between.append(node)
        return before

    def _outputs(self, logits: Sequence[fx.Node]) -> tuple[str, ...]:
        """The model's outputs among the logits' nodes. Raises `_Whole` where anything else reads one of these."""
        inside = {*logits, self.loss}
        for node in logits:
            for reader in node.users:
                if reader not in inside and reader.op != "output":
                    source = str(reader.meta.get("source", ""))
                    raise _Whole(f"its logits are also read by {call_name(reader) or reader.name} ({source})")
        return tuple(name for name, node in self.graph.outputs.items() if node in logits)

    def _check_writes(self, product: fx.Node, operands: Sequence[NodeOrName | None]) -> None:
        """Raise `_Whole` where an operand is written between the head and the loss."""
        roots = {storage_root(node) for node in operands if isinstance(node, fx.Node)}
        nodes = self.graph.nodes
        for node in nodes[nodes.index(product) : nodes.index(self.loss)]:
            if not roots.isdisjoint(written_roots(node)):
                raise _Whole(f"{call_name(node)} writes one of its operands after the head")


def product_of(graph: OpGraph, node: fx.Node) -> tuple[fx.Node, NodeOrName, NodeOrName | None] | None:
    """Input, weight (rows x width) and bias of a linear layer, called as a module, as a function or as a product with a
    transposed weight; None for another node."""
    if "eval_args" in node.meta:
        return None
    name, given = call_name(node), dict[str, Any](zip(("input", "weight", "bias"), node.args)) | dict(node.kwargs)
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        bias = f"{node.target}.bias" if isinstance(leaf, nn.Linear) and leaf.bias is not None else None
        return (given["input"], f"{node.target}.weight", bias) if type(leaf) is nn.Linear else None
    if name == "linear":
        is_matrix = given["weight"].meta["val"].dim() == 2
        return (given["input"], given["weight"], given.get("bias")) if is_matrix else None
    if name in ("matmul", "mm") and len(node.args) == 2:
        hidden, turned = node.args
        if isinstance(turned, fx.Node) and isinstance(hidden, fx.Node) and _axes(graph, turned) == [1, 0]:
            (weight,) = turned.all_input_nodes
            return hidden, weight, None
    return None


def _axes(graph: OpGraph, node: fx.Node) -> list[int] | None:
    """The order of dimensions that a transposition makes; None for another node."""
    before = copied_operand(graph, node, Elements.MOVED)
    if before is None:
        return None
    axes = [0] * before.meta["val"].dim()
    for dim, size in enumerate(before.meta["val"].shape):
        (state,) = effect_of(graph, node, {before: ByRow(dim=dim)}, size).states
        assert isinstance(state, ByRow)
        axes[state.dim] = dim
    return axes


def _factor(graph: OpGraph, node: fx.Node) -> float | None:
    """The number by which a call multiplies all elements of its only operand; None for another node."""
    called = operators(graph, node) if is_linear(graph, node, node.all_input_nodes) else None
    if called is None or len(node.all_input_nodes) > 1 or not all(torch.Tag.pointwise in func.tags for func in called):
        return None
    one = torch.ones((), dtype=torch.float64)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: one)
    return float(call_node(graph, node, args, kwargs, torch.empty_like))


def _moves_rows(graph: OpGraph, node: fx.Node, before: fx.Node) -> bool:
    """Whether a reshape or an index leaves each row of classes whole."""
    ways = (Elements.SAME, Elements.RESHAPED, *([Elements.PART] if node.target is operator.getitem else []))
    if copied_operand(graph, node, *ways) is not before:
        return False
    classes = before.meta["val"].shape[-1]
    effect = effect_of(graph, node, {before: ByRow(dim=before.meta["val"].dim() - 1)}, classes)
    last = ByRow(dim=node.meta["val"].dim() - 1)
    return effect.states == (last,) and not effect.met and node.meta["val"].shape[-1] == classes
