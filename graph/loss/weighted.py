"""The user's own rule: each micro-batch counts as `loss_weight(rows)` says.

In: an op graph of one micro-batch. Out: the same graph, whose loss is multiplied by a share that comes as an input. A
micro-batch whose share is 0 adds exactly zero to the loss and to all gradients, also where its own loss is NaN.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ..edit import GraphEdit, read_instead, replace_uses
from ..loss_terms import WEIGHT, CountRules, Divisor, LossRules, LossTerm
from ..opgraph import OpGraph, value_tensors
from .counted import add_input, fake_like


def weigh_loss(graph: OpGraph) -> OpGraph:
    """Multiply the loss by the share of the micro-batch, and note that in `graph.loss`."""
    loss = graph.outputs["loss"]
    border = list(_border(loss))
    share = add_input(graph, WEIGHT, torch.float32)
    nothing = _insert(graph, share, share, operator.eq, (share, 0), torch.bool)
    for node, reader in border:
        _gate(graph, node, reader, nothing)
    before = loss.meta["val"].dtype
    dtype = torch.promote_types(before, torch.float32)
    weighted = _insert(graph, loss, loss, operator.mul, (loss, share), dtype)
    made = _insert(graph, weighted, loss, torch.masked_fill, (weighted, nothing, 0.0), dtype)
    if dtype != before:
        made = _insert(graph, made, loss, torch.Tensor.to, (made, before), before)
    source = str(loss.meta.get("source", ""))
    replace_uses(graph, {loss: made}, readers=())
    term = LossTerm(kind="weighted", source=source, counts="what loss_weight gives", input=WEIGHT)
    rules = CountRules(divisors=(Divisor(input=WEIGHT, dtype="float32", spread=False),), by_user=True)
    graph.loss = LossRules(terms=[term], rules=rules)
    return graph


def _border(loss: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Values that gradients reach, each with a reader that is part of the loss: made in front of the top-level forward
    or the loss function, in a module or by a parameter. Where gradients stop here, no NaN of a loss gets any further.
    """
    inside = {"", str(loss.meta.get("module_path", ""))}
    seen, waiting = {loss}, [loss]
    while waiting:
        node = waiting.pop()
        for argument in node.all_input_nodes:
            if not any(tensor.requires_grad for tensor in value_tensors(argument.meta.get("val"))):
                continue
            if argument.op in ("get_attr", "call_module") or argument.meta.get("module_path") not in inside:
                yield argument, node
            elif argument not in seen:
                seen.add(argument)
                waiting.append(argument)


def _gate(graph: OpGraph, node: fx.Node, reader: fx.Node, nothing: fx.Node) -> None:
    """Let the reader read the same value, whose gradient is exactly zero where the micro-batch counts nothing."""
    if not isinstance(node.meta["val"], torch.Tensor):
        return
    value = node.meta["val"]
    edit = GraphEdit(graph, reader, like=node)
    apart = edit.put("call_method", "detach", (node,), value.detach(), view_of=node)
    made = edit.put("call_function", torch.where, (nothing, apart, node), fake_like(value, value.shape, value.dtype))
    read_instead(reader, {node: made})


def _insert(graph: OpGraph, place: fx.Node, like: fx.Node, target: Any, args: tuple[Any, ...], dtype: Any) -> fx.Node:
    call: tuple[str, Any] = ("call_method", "to") if target is torch.Tensor.to else ("call_function", target)
    fake = fake_like(like.meta["val"], like.meta["val"].shape, dtype)
    return GraphEdit(graph, place, after=True, like=like).put(*call, args, fake)
