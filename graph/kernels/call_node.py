"""One node of an op graph called on other values than it was recorded with, such as fake tensors of other sizes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, fx

from ..opgraph import OpGraph
from .stand_ins import SHAPE_RULES


def call_node(graph: OpGraph, node: fx.Node, args: Any, kwargs: Any, fake: Callable[[Tensor], Tensor]) -> Any:
    """What the node's call gives on these arguments. `fake`: what stands for a parameter or buffer of a leaf module."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        own = [*leaf.named_parameters(remove_duplicate=False), *leaf.named_buffers(remove_duplicate=False)]
        return torch.func.functional_call(leaf, {name: fake(tensor) for name, tensor in own}, args, kwargs)
    target: Any = SHAPE_RULES.get(node.target, node.target)
    return target(*args, **kwargs)


def call_key(
    graph: OpGraph, node: fx.Node, args: Any, kwargs: Any, seen: Callable[[Tensor], Hashable]
) -> Hashable | None:
    """Equal for nodes whose calls on these arguments give the same; None where an argument cannot be compared. `seen`:
    what counts of a tensor. A node among the arguments stands for the value that it was recorded with."""
    target: Any = node.target
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(target))
        own = [(tuple(p.shape), p.dtype, p.requires_grad) for p in leaf.parameters()]
        target = (repr(leaf), type(leaf), leaf.training, *own)

    def look(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return look(value.meta["val"])
        if isinstance(value, Tensor):
            return seen(value)
        if isinstance(value, (tuple, list)):
            return tuple(look(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, look(item)) for name, item in value.items())
        return (value.start, value.stop, value.step) if isinstance(value, slice) else (type(value), value)

    key = (node.op, target, look(args), look(kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key
