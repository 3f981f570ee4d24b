"""One graph node as a Python expression, and every literal that it may hold.

In: a node, and what each of its operands is called. Out: text that computes the same value when it is run, on whatever
device has the operands. Arguments that differ in evaluation mode become `a if self.training else b`.
"""

from __future__ import annotations

import enum
import math
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.errors import CaptureError
from .imports import Imports
from .paths import member, quote

INFIX: dict[Any, tuple[str, int]] = {
    operator.or_: ("|", 2), operator.xor: ("^", 3), operator.and_: ("&", 4),
    operator.lshift: ("<<", 5), operator.rshift: (">>", 5),
    operator.add: ("+", 6), operator.sub: ("-", 6),
    operator.mul: ("*", 7), operator.truediv: ("/", 7), operator.floordiv: ("//", 7), operator.mod: ("%", 7),
    operator.matmul: ("@", 7), operator.pow: ("**", 9),
    operator.eq: ("==", 1), operator.ne: ("!=", 1), operator.lt: ("<", 1), operator.le: ("<=", 1),
    operator.gt: (">", 1), operator.ge: (">=", 1),
}  # fmt: skip
PREFIX: dict[Any, str] = {operator.neg: "-", operator.invert: "~", operator.pos: "+"}
IN_PLACE: dict[Any, str] = {
    operator.iadd: "+=", operator.isub: "-=", operator.imul: "*=", operator.itruediv: "/=", operator.ifloordiv: "//=",
    operator.imod: "%=", operator.ipow: "**=", operator.imatmul: "@=", operator.iand: "&=", operator.ior: "|=",
    operator.ixor: "^=", operator.ilshift: "<<=", operator.irshift: ">>=",
}  # fmt: skip
CONDITION, UNARY, ATOM = 0, 8, 10


@dataclass(frozen=True)
class Text:
    """An expression and how tightly it binds; `arguments` are kept apart so that a long call can be wrapped."""

    text: str
    binding: int = ATOM
    arguments: tuple[str, ...] | None = None

    def wrap(self, binding: int) -> str:
        """The text, in parentheses where it binds less tightly than its surroundings."""
        return self.text if self.binding >= binding else f"({self.text})"


class Expressions:
    """Prints nodes. `name(node)` gives an operand's text, `device()` an expression for the device at hand."""

    def __init__(self, imports: Imports, path: str, name: Callable[[fx.Node], Text], device: Callable[[], str]):
        self.imports = imports
        self.path = path  # of the module whose forward is written: "self"
        self.name = name
        self.device = device

    def prepare(self, node: fx.Node) -> None:
        """Import what the node's statement needs."""
        target: Any = node.target
        self.imports.draws |= bool(node.meta.get("random"))
        if node.op == "call_function" and not self._has_syntax(target):
            self.imports.function(target)

    def _has_syntax(self, target: Any) -> bool:
        signs = target in INFIX or target in PREFIX or target in IN_PLACE
        return signs or target in (operator.getitem, operator.setitem, getattr) or tensor_method(target) is not None

    def node(self, node: fx.Node) -> Text:
        if node.op == "get_attr":
            return Text(member("self", self.path, str(node.target)))
        if "eval_args" not in node.meta:
            return self._call(node, node.args, node.kwargs)
        args, kwargs = node.meta["eval_args"], node.meta["eval_kwargs"]
        if len(args) == len(node.args) and list(kwargs) == list(node.kwargs):
            both = tuple(Either(a, b) for a, b in zip(node.args, args))
            return self._call(node, both, {k: Either(v, kwargs[k]) for k, v in node.kwargs.items()})
        training, evaluation = self._call(node, node.args, node.kwargs), self._call(node, args, kwargs)
        return Text(f"{training.wrap(1)} if self.training else {evaluation.wrap(1)}", CONDITION)

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Text:
        if node.op == "call_module":
            return self._function(member("self", self.path, str(node.target)), args, kwargs)
        if node.op == "call_method":
            return self._method(str(node.target), args, kwargs)
        target: Any = node.target
        method = tensor_method(target)
        if method is not None:
            sign = getattr(operator, method, None) if method.startswith("__") and not kwargs else None
            if sign not in INFIX or len(args) != 2:
                return self._method(method, args, kwargs)
            target = sign
        if not kwargs and len(args) == 2 and target in INFIX:
            sign, binding = INFIX[target]
            left, right = self.value(args[0]), self.value(args[1])
            tight = (binding + 1, binding) if target is operator.pow else (binding, binding + 1)
            if binding == 1:
                tight = (2, 2)
            return Text(f"{left.wrap(tight[0])} {sign} {right.wrap(tight[1])}", binding)
        if not kwargs and len(args) == 1 and target in PREFIX:
            return Text(f"{PREFIX[target]}{self.value(args[0]).wrap(UNARY)}", UNARY)
        if target is operator.getitem:
            return Text(f"{self.value(args[0]).wrap(ATOM)}[{self.index(args[1])}]")
        if target is getattr and isinstance(args[1], str) and len(args) == 2:
            return Text(f"{self.value(args[0]).wrap(ATOM)}.{args[1]}")
        return self._function(self.imports.function(target), args, kwargs)

    def _method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Text:
        receiver = self.value(args[0])
        if name == "to":  # a tensor is moved to where the others are
            args = tuple(torch.device("cpu") if a == "cpu" else a for a in args)
        return self._function(f"{receiver.wrap(ATOM)}.{name}", args[1:], kwargs)

    def _function(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Text:
        parts = [self.value(a).text for a in args]
        for key, value in kwargs.items():
            parts.append(f"{key}={self.device() if key == 'device' and value == 'cpu' else self.value(value).text}")
        return Text(f"{function}({', '.join(parts)})", arguments=(function, *parts))

    def index(self, index: Any) -> str:
        """The text between the brackets of a subscription."""
        if isinstance(index, tuple) and index:
            return ", ".join(self._slice(i) for i in index) + ("," if len(index) == 1 else "")
        return self._slice(index)

    def _slice(self, index: Any) -> str:
        if not isinstance(index, slice):
            return self.value(index).text
        start, stop = ("" if part is None else self.value(part).text for part in (index.start, index.stop))
        step = "" if index.step is None else f":{self.value(index.step).text}"
        return f"{start}:{stop}{step}"

    def value(self, value: Any) -> Text:
        """An argument: a node's name or a literal. Raises CaptureError for what has no literal form."""
        if isinstance(value, Either):
            return self._either(value.training, value.evaluation)
        if isinstance(value, fx.Node):
            return self.name(value)
        if isinstance(value, (tuple, list, set, frozenset)) and not isinstance(value, torch.Size):
            return self._sequence(value)
        if isinstance(value, dict):
            return Text("{" + ", ".join(f"{literal(k).text}: {self.value(v).text}" for k, v in value.items()) + "}")
        if isinstance(value, slice):
            return Text(f"slice({', '.join(self.value(p).text for p in (value.start, value.stop, value.step))})")
        if isinstance(value, torch.device):
            return Text(self.device()) if value.type != "meta" else Text('torch.device("meta")')
        if isinstance(value, enum.Enum) and not isinstance(value, (int, str)):
            return Text(f"{self.imports.reference(type(value))}.{value.name}")
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            return Text(self.imports.function(value))
        return literal(value)

    def _sequence(self, value: Any) -> Text:
        items = [self.value(item).text for item in value]
        if isinstance(value, list):
            return Text(f"[{', '.join(items)}]")
        if isinstance(value, (set, frozenset)):
            return Text(f"{type(value).__name__}([{', '.join(sorted(items))}])")
        return Text(f"({', '.join(items)}{',' if len(items) == 1 else ''})")

    def _either(self, training: Any, evaluation: Any) -> Text:
        """One text for an argument that may differ between training and evaluation."""
        if same(training, evaluation):
            return self.value(training)
        if training is True and evaluation is False:
            return Text("self.training")
        if training is False and evaluation is True:
            return Text("not self.training", CONDITION)
        both = (training, evaluation)
        alike = all(isinstance(v, list) for v in both) or all(isinstance(v, tuple) for v in both)
        if alike and len(training) == len(evaluation):
            items = [Either(a, b) for a, b in zip(training, evaluation)]
            return self._sequence(items if isinstance(training, list) else tuple(items))
        first, second = self.value(training), self.value(evaluation)
        return Text(f"{first.wrap(1)} if self.training else {second.wrap(1)}", CONDITION)


def tensor_method(target: Any) -> str | None:
    """The name under which a function is a method of tensors; that of `__pow__` differs from its own."""
    name = getattr(target, "__name__", "")
    for method in (name, f"__{name}__", f"__r{name}__"):
        if name and getattr(torch.Tensor, method, None) is target:
            return method
    return None


@dataclass(frozen=True)
class Either:
    """An argument in training and in evaluation mode."""

    training: Any
    evaluation: Any


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, all the way down; nodes by identity, NaN equal to itself."""
    if isinstance(left, fx.Node) or isinstance(right, fx.Node):
        return left is right
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, slice) and isinstance(right, slice):
        return same((left.start, left.stop, left.step), (right.start, right.stop, right.step))
    if type(left) is not type(right):
        return False
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def literal(value: Any) -> Text:
    """A plain Python or torch constant. Raises CaptureError for anything else."""
    if isinstance(value, torch.Size):
        return Text(f"torch.Size({list(value)})")
    if isinstance(value, bool) or value is None:
        return Text(repr(value))
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, int):
        return Text(repr(int(value)), ATOM if value >= 0 else UNARY)
    if isinstance(value, complex):
        return Text(repr(value), UNARY)
    if isinstance(value, str):
        return Text(quote(str(value)))
    if value is Ellipsis:
        return Text("...")
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return Text(str(value))
    if isinstance(value, (range, bytes)):
        return Text(repr(value))
    kind = f"{type(value).__module__}.{type(value).__name__}"
    raise CaptureError(f"a {kind} cannot be written into a generated file: {value!r}")


def _float(value: float) -> Text:
    if math.isfinite(value):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            if value == torch.finfo(dtype).min:
                return Text(f"torch.finfo({dtype}).min")
        return Text(repr(float(value)), ATOM if math.copysign(1, value) > 0 else UNARY)
    return Text(f'float("{value}")')
