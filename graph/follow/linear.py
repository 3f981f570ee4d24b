"""The summands of a loss: its linear path, walked back from the loss to the reductions that make it.

A value on the path is linear in what it is made of: sums, differences, factors that do not depend on the batch, casts
and views of one element. Where the path ends stands a term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ...ir.calls import call_name

_SUMS = {"add", "iadd", "add_", "sub", "isub", "sub_", "rsub"}
_FACTORS = {"mul", "imul", "mul_", "multiply"}
_QUOTIENTS = {"truediv", "itruediv", "div", "div_", "true_divide", "divide"}
_SAME = {"neg", "view", "view_as", "reshape", "squeeze", "unsqueeze", "contiguous", "clone", "to", "float", "double"}
_SAME |= {"half", "bfloat16", "type", "type_as", "flatten", "pos"}
_OF_SEVERAL = {"stack", "cat", "concat"}
_REDUCTIONS = {"sum": "sum", "nansum": "sum", "mean": "mean"}


def is_scalar(node: Any) -> bool:
    """Whether the node's value is a tensor of one element."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.numel() == 1


def is_quotient(node: fx.Node) -> bool:
    return call_name(node) in _QUOTIENTS and not node.kwargs.get("rounding_mode")


@dataclass
class LinearPath:
    """The nodes through which the loss depends linearly on its terms, and the terms' nodes in order."""

    inside: set[fx.Node] = field(default_factory=set)
    terms: list[fx.Node] = field(default_factory=list)

    @staticmethod
    def to(node: fx.Node, depends: Callable[[Any], bool]) -> LinearPath:
        """The path that ends in `node`. `depends` says whether a factor depends on the batch."""
        path = LinearPath()
        waiting = [node]
        while waiting:
            current = waiting.pop()
            if current in path.inside or current in path.terms:
                continue
            before = _summands(current, depends)
            if before is None:
                path.terms.append(current)
            else:
                path.inside.update((current, *_gathered(current)))
                waiting += reversed(before)
        return path


def _summands(node: fx.Node, depends: Callable[[Any], bool]) -> list[fx.Node] | None:
    """The nodes in which a node of the path is linear, without those that do not depend on the batch; None for a
    node that is a term."""
    name, operands = call_name(node), node.args
    if not is_scalar(node) or not operands:
        return None
    if name in ("sum", "mean") and isinstance(operands[0], fx.Node) and call_name(operands[0]) in _OF_SEVERAL:
        found: list[Any] = list(_entries(operands[0]))
    elif name in _SUMS:
        found = list(operands[:2])
    elif name in _FACTORS and sum(map(depends, operands[:2])) == 1:
        found = [operand for operand in operands[:2] if depends(operand)]
    elif (is_quotient(node) and not depends(operands[1])) or name in _SAME or _is_item(node):
        found = [operands[0]]
    else:
        return None
    found = [operand for operand in found if depends(operand)]
    return found if found and all(map(is_scalar, found)) else None


def _gathered(node: fx.Node) -> list[fx.Node]:
    """The call that puts a sum's or a mean's terms together, where there is one."""
    if call_name(node) not in _REDUCTIONS:
        return []
    return [n for n in node.all_input_nodes if call_name(n) in _OF_SEVERAL]


def _entries(node: fx.Node) -> tuple[Any, ...]:
    given = node.args[0] if node.args else node.kwargs.get("tensors", ())
    return tuple(given) if isinstance(given, (tuple, list)) else ()


def _is_item(node: fx.Node) -> bool:
    return call_name(node) == "getitem" and isinstance(node.args[0], fx.Node) and is_scalar(node.args[0])


def reduction_of(node: fx.Node) -> str:
    """ "sum" or "mean" if the node reduces a tensor over all of its dimensions so, else ""."""
    name = call_name(node)
    kind = _REDUCTIONS.get(name, "")
    if kind and is_scalar(node):
        return kind
    if name in ("dot", "vdot") or (name == "count_nonzero" and is_scalar(node)):
        return "sum"
    given = node.kwargs.get("reduction")
    is_loss = node.op == "call_function" and getattr(node.target, "__module__", "") == F.__name__
    return str(given) if is_loss and is_scalar(node) and given in ("sum", "mean") else ""
