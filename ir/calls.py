"""The callee of an fx node: an op, in a program; a function or a method, in a graph of the user's model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from .ops import Op


def op_of(node: fx.Node) -> Op:
    """The op that a program's node calls."""
    assert isinstance(node.target, Op), f"{node.format_node()} calls no op"
    return node.target


def function_name(target: Callable[..., Any] | str, default: str = "") -> str:
    """The name of the function, method or module that a model's node calls; `default` for a function without a name."""
    return target if isinstance(target, str) else getattr(target, "__name__", default)


def call_name(node: fx.Node) -> str:
    """The name of what a node calls: "" for placeholders and modules; that of an ATen overload is its packet's."""
    if node.op not in ("call_function", "call_method"):
        return ""
    return function_name(node.target).partition(".")[0]
