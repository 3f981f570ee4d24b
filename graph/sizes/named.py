"""Graphs for any length, at one length: all numbers are there, and know of which sizes they are made.

In: an op graph with symbolic sizes. Out: the same graph at given sizes. Passes compute with its numbers as with any;
where one is printed, it is computed from the sizes of the inputs at hand, so that the code holds for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from ...ir.errors import PassError
from ...ir.program import SizeRange, Sizes, wrong_expression
from ...runtime.torch_names import FakeTensor, PythonPrinter
from ..edit import change_arguments, copy_edges, describe
from ..opgraph import OpGraph, build_module
from .nodes import SizeNodes


class Named:
    """A number that is an expression of named sizes."""

    expression: sympy.Expr

    def __new__(cls, value: float, expression: sympy.Expr) -> Any:
        made = super().__new__(cls, value)  # type: ignore[call-arg]
        made.expression = expression
        return made

    def __getnewargs__(self) -> tuple[Any, sympy.Expr]:
        return self.real, self.expression  # type: ignore[attr-defined]


class NamedSize(Named, int):  # type: ignore[misc]
    """A whole one."""


class NamedNumber(Named, float):  # type: ignore[misc]
    """One that is not whole."""


def expressions_of(value: Any) -> Any:
    """The value with each number that has an expression replaced by the expression."""
    return fx.node.map_aggregate(value, lambda leaf: leaf.expression if isinstance(leaf, Named) else leaf)


def symbol(name: str) -> sympy.Symbol:
    return sympy.Symbol(name, positive=True, integer=True)


def text_of(size: Any) -> str:
    """The expression of a named size as Python; "" for a plain number."""
    return str(PythonPrinter().doprint(size.expression)) if isinstance(size, Named) else ""


def dims_of(node: fx.Node, names: Collection[str]) -> tuple[str, ...]:
    """`TensorSpec.dims` of a node's value in a graph with these named sizes. Raises `PassError` where a pass has made
    the value and does not say of which sizes, or of such that no program can compute."""
    shape, dims = tuple(node.meta["val"].shape), node.meta.get("dims")
    is_ours = node.op == "placeholder" and dims != shape  # what a loss divides by: one number for each micro-batch
    if not names or not shape or dims == () or is_ours:
        return ()
    if dims != shape:
        raise PassError(
            f"{node.name} crosses a stage border, and is not known to follow {', '.join(names)}: leave dynamic_shapes "
            "out, or the pass that makes it (split-vocabulary)"
        )
    texts = tuple(map(text_of, dims))
    for text in filter(None, texts):
        wrong = wrong_expression(text, names)
        if wrong:
            raise PassError(f"{node.name} crosses a stage border; its size {text} {wrong}")
    return texts


def names_in(arguments: Any) -> set[str]:
    """The named sizes of which numbers among these arguments are made."""
    found: set[str] = set()

    def note(leaf: Any) -> Any:
        found.update(str(each) for each in (leaf.expression.free_symbols if isinstance(leaf, Named) else ()))
        return leaf

    fx.node.map_aggregate(arguments, note)
    return found


def substitute_sizes(graph: OpGraph, sizes: Sizes, ranges: Mapping[str, SizeRange]) -> OpGraph:
    """The graph with these sizes in place of its symbols. Those without a range become plain numbers.

    The nodes that computed sizes are gone; `meta["dims"]` has the dimensions of each tensor that named sizes make.
    """
    return _AtSizes(graph, sizes, ranges).substitute()


class _AtSizes:
    def __init__(self, graph: OpGraph, sizes: Sizes, ranges: Mapping[str, SizeRange]):
        self.graph, self.ranges = graph, dict(ranges)
        own = {size.node.expr: name for name, size in graph.symbols.items()}
        number = {name: sympy.Integer(size) for name, size in sizes.items()}
        self.names = {expr: symbol(name) if name in ranges else number[name] for expr, name in own.items()}
        self.values = {symbol(name): size for name, size in number.items()}
        self.known: dict[sympy.Basic, Any] = {}
        self.fakes: dict[int, Any] = {}
        self.alive: list[Any] = []

    def substitute(self) -> OpGraph:
        made, copies, copied = fx.Graph(), dict[fx.Node, Any](), list[fx.Node]()
        for node in self.graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt | torch.SymFloat):
                copies[node] = self.number(value)
                continue
            copied.append(node)
            copy = copies[node] = made.node_copy(node, copies.__getitem__)
            copy.meta["val"] = fx.node.map_aggregate(value, self.concrete)
            if isinstance(value, torch.Tensor):
                dims = tuple(self.number(size) for size in value.shape)
                copy.meta["dims"] = dims if any(isinstance(size, Named) for size in dims) else ()
        for node in copied:
            copy_edges(node, copies[node], copies.__getitem__)
        return dataclasses.replace(
            self.graph,
            module=build_module(self.graph.model, made, self.graph.unregistered_tensors),
            inputs={name: self.concrete(fake) for name, fake in self.graph.inputs.items()},
            outputs={name: copies[node] for name, node in self.graph.outputs.items()},
            symbols={},
            sizes=self.ranges,
            parts=dict(self.graph.parts),
            hooks=dict(self.graph.hooks),
        )

    def number(self, size: Any) -> Any:
        """A size of the traced graph as a number, which has a name where it is no constant."""
        if not isinstance(size, torch.SymInt | torch.SymFloat):
            return size
        expr = size.node.expr
        if expr not in self.known:
            expression = expr.subs(self.names)
            value = expression.subs(self.values)
            is_whole = isinstance(size, torch.SymInt)
            number = int(value) if is_whole else float(value)
            kind = NamedSize if is_whole else NamedNumber
            self.known[expr] = kind(number, expression) if expression.free_symbols else number
        return self.known[expr]

    def concrete(self, value: Any) -> Any:
        """A value of the traced graph with plain numbers for sizes."""
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self.number(value)
        if not isinstance(value, FakeTensor):
            return value
        if not any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride())):
            return value
        if id(value) not in self.fakes:
            shape, stride = ([int(self.number(n)) for n in ns] for ns in (value.shape, value.stride()))
            with value.fake_mode:
                made = torch.empty_strided(shape, stride, dtype=value.dtype)
            self.fakes[id(value)] = made.requires_grad_(value.requires_grad) if value.requires_grad else made
            self.alive.append(value)
        return self.fakes[id(value)]


def sized_inputs(inputs: list[fx.Node]) -> set[str]:
    """The named sizes that are dimensions of one of these nodes."""
    return {name for name, _, _ in _named_dims(inputs)}


def _named_dims(inputs: list[fx.Node]) -> Iterator[tuple[str, fx.Node, int]]:
    for node in inputs:
        for dim, size in enumerate(node.meta.get("dims", ())):
            if isinstance(size, NamedSize) and size.expression.is_Symbol:
                yield str(size.expression), node, dim


def compute_sizes(graph: fx.Graph) -> None:
    """Compute the named numbers among the arguments of a graph's nodes from the sizes of its inputs, without those that
    a rematerialisation does not get."""
    users = [node for node in graph.nodes if names_in((node.args, node.kwargs, *_evaluation(node)))]
    if not users:
        return
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.meta.get("first_only")]
    first = next(node for node in graph.nodes if node.op != "placeholder")

    def make(op: str, target: Any, args: tuple, value: Any) -> fx.Node:
        with graph.inserting_before(first):
            node = graph.create_node(op, target, args)
        meta = dict.fromkeys(("module_path", "module_type", "source", "block", "block_hash"), "")
        size = {"size": str(value.expression)} if op == "call_method" else {}
        return describe(node, meta, value, no_grad=False, autocast=None, **size)

    nodes = SizeNodes(make)
    for name, tensor, dim in _named_dims(inputs):
        nodes.learn(symbol(name), tensor, dim, tensor.meta["dims"][dim])

    def compute(leaf: Any) -> Any:
        if not isinstance(leaf, Named):
            return leaf
        try:
            return nodes.node(leaf.expression)
        except NotImplementedError as error:
            raise PassError(str(error)) from error

    for node in users:
        change_arguments(node, lambda *arguments: fx.node.map_aggregate(arguments, compute))


def show_sizes(graph: fx.Graph) -> None:
    """Give the types of values, in comments of printed code, the names of their sizes (`meta["shown"]`)."""
    for node in graph.nodes:
        if node.meta.get("dims"):
            node.meta["shown"] = tuple(text_of(size) or str(size) for size in node.meta["dims"])


def _evaluation(node: fx.Node) -> tuple[Any, Any]:
    return node.meta.get("eval_args"), node.meta.get("eval_kwargs")
