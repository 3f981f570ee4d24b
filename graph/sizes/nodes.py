"""Sizes to graph nodes: a number such as `2*sequence` is computed in the graph from the sizes of its inputs.

In: an expression of sizes. Out: the fx node that computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
from torch import fx

from ...runtime.torch_names import size_functions as sizes

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    sympy.Pow: operator.pow,
    sizes.FloorDiv: operator.floordiv,
    sizes.CleanDiv: operator.floordiv,
    sizes.Mod: operator.mod,
    sizes.PythonMod: operator.mod,
    sizes.IntTrueDiv: operator.truediv,
    sizes.FloatTrueDiv: operator.truediv,
    sizes.ToFloat: float,
    sizes.TruncToInt: int,
    sizes.Max: max,
    sizes.Min: min,
    sympy.Max: max,
    sympy.Min: min,
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
}


class SizeNodes:
    """Nodes for size expressions, each made once. `make(op, target, args, value)` adds a node."""

    def __init__(self, make: Callable[[str, Any, tuple, Any], fx.Node]):
        self.make = make
        self.known: dict[sympy.Basic, fx.Node] = {}

    def learn(self, symbol: sympy.Basic, tensor: fx.Node, dim: int, value: Any) -> None:
        """Let a symbol be the size of a dimension of a tensor, unless it is known."""
        if symbol not in self.known:
            self.known[symbol] = self.make("call_method", "size", (tensor, dim), value)

    def node(self, expr: sympy.Basic) -> fx.Node | int | float:
        """The node, or plain number, that equals an expression. Raises `NotImplementedError` for one that has none."""
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if isinstance(expr, (sympy.Rational, sympy.Float)):
            return float(expr)
        if expr not in self.known:
            function = next((f for kind, f in _FUNCTIONS.items() if isinstance(expr, kind)), None)
            if function is None:
                raise NotImplementedError(f"the size expression {expr} ({type(expr).__name__}) has no graph form")
            args = [self.node(arg) for arg in expr.args]
            if function in (float, int):
                return self._add(expr, function, tuple(args))
            total: Any = args[0]
            for i, arg in enumerate(args[1:], start=2):
                whole = i == len(args)
                total = self._add(expr if whole else expr.func(*expr.args[:i]), function, (total, arg))
        return self.known[expr]

    def _add(self, expr: sympy.Basic, function: Callable[..., Any], args: tuple) -> fx.Node:
        values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
        node = self.known[expr] = self.make("call_function", function, args, function(*values))
        return node
