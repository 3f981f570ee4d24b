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

from ..loss_terms import WEIGHT, CountRules, Divisor, LossRules, LossTerm
from ..opgraph import OpGraph, plain_meta, value_tensors
from .counted import add_input, fake_like, replace_on_path


def weigh_loss(graph: OpGraph) -> OpGraph:
    """Multiply the loss by the share of the micro-batch, and note that in `graph.loss`."""
    loss = graph.outputs["loss"]
    border = list(_border(loss))
    share = add_input(graph, WEIGHT, torch.float32)
    nothing = _after(graph, share, share, operator.eq, (share, 0), torch.bool)
    for node, reader in border:
        _gate(graph, node, reader, nothing)
    before = loss.meta["val"].dtype
    dtype = torch.promote_types(before, torch.float32)
    weighted = _after(graph, loss, loss, operator.mul, (loss, share), dtype)
    made = _after(graph, weighted, loss, torch.masked_fill, (weighted, nothing, 0.0), dtype)
    if dtype != before:
        made = _after(graph, made, loss, torch.Tensor.to, (made, before), before)
    source = str(loss.meta.get("source", ""))
    replace_on_path(graph, loss, made, set())
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
    apart = _before(graph, reader, node, torch.Tensor.detach, (node,), value.dtype)
    apart.meta.update(val=value.detach(), alias_of=node)
    made = _before(graph, reader, node, torch.where, (nothing, apart, node), value.dtype)
    reader.replace_input_with(node, made)


def _after(graph: OpGraph, place: fx.Node, like: fx.Node, target: Any, args: tuple[Any, ...], dtype: Any) -> fx.Node:
    with graph.graph.inserting_after(place):
        return _made(graph, like, target, args, dtype)


def _before(graph: OpGraph, place: fx.Node, like: fx.Node, target: Any, args: tuple[Any, ...], dtype: Any) -> fx.Node:
    with graph.graph.inserting_before(place):
        return _made(graph, like, target, args, dtype)


def _made(graph: OpGraph, like: fx.Node, target: Any, args: tuple[Any, ...], dtype: Any) -> fx.Node:
    if target in (torch.Tensor.detach, torch.Tensor.to):
        node = graph.graph.call_method(target.__name__, args)
    else:
        node = graph.graph.call_function(target, args)
    node.meta = {**plain_meta(like), "val": fake_like(like.meta["val"], like.meta["val"].shape, dtype)}
    return node
