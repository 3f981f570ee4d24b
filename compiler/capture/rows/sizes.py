"""One trace for every number of rows: what forward asks of sizes is followed, and the calls run again at other sizes.

In: a trace at one number of rows, whose forward gets a `Tracked` number for each size of a tensor that depends on the
batch. Out: the same graph for a batch with other rows, with the numbers that follow from its sizes. Whatever Python
reads of such a number (a branch, a loop, a text, `int()`) is written down, and must be the same at the other sizes:
else `OtherTrace` says where, and the model is traced again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ....graph.opgraph import value_tensors
from ....ir.errors import CaptureError

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY: dict[str, Callable[..., Any]] = {
    "__neg__": operator.neg, "__pos__": operator.pos, "__abs__": abs, "__round__": round, "__floor__": math.floor,
    "__ceil__": math.ceil, "__trunc__": math.trunc,
}  # fmt: skip
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_READ: dict[str, Callable[..., Any]] = {
    "__bool__": bool, "__int__": int, "__index__": operator.index, "__float__": float,
    "__repr__": repr, "__str__": str, "__format__": format,
}  # fmt: skip
_SIZES = ("shape", "size", "numel", "nelement", "stride", "storage_offset", "nbytes")
_FIXED = ("dim", "ndimension", "ndim", "__len__", "is_contiguous")


class OtherTrace(CaptureError):
    """The model does something else for other rows."""


class SizeSlot(int):
    """A number among the arguments of a traced call, and the one that it is made of."""

    number: Any

    def __new__(cls, value: int, number: Any) -> SizeSlot:
        made = super().__new__(cls, value)
        made.number = number
        return made


class NumberSlot(float):
    """The same for one that is not whole."""

    number: Any

    def __new__(cls, value: float, number: Any) -> NumberSlot:
        made = super().__new__(cls, value)
        made.number = number
        return made


@dataclass(frozen=True)
class Asked:
    """A size: `query` of the tensor of a node, and its place in the answer."""

    node: fx.Node
    query: Callable[..., Any]
    args: tuple
    place: int | None = None
    kwargs: tuple = ()


@dataclass(frozen=True)
class Computed:
    """The result of a function of numbers. `kind`: the type of the result, since 1 and 1.0 are equal operands."""

    function: Callable[..., Any]
    operands: tuple
    kind: type


def looks_of(value: Any) -> list[tuple[int, torch.dtype, bool]]:
    """For each tensor of a value, what other rows must not change: dimensions, type, and whether it has a gradient."""
    return [(tensor.dim(), tensor.dtype, tensor.requires_grad) for tensor in value_tensors(value)]


@dataclass
class Call:
    """A recorded call. `tape` has it in the order in which it ran. `looks`: of its results as the call gave them; a
    later write in place may let them need a gradient."""

    node: fx.Node
    run: Callable[..., Any]
    args: Any
    kwargs: Any
    looks: list[tuple[int, torch.dtype, bool]]


@dataclass
class Read:
    """A value that Python has read, and where."""

    number: Any
    value: Any
    line: str


@dataclass
class CallOutcome:
    """The result of a call that made no tensor, and its line."""

    run: Callable[..., Any]
    args: Any
    kwargs: Any
    value: Any
    line: str


@dataclass
class ModeSwitch:
    """A mode that is switched."""

    switch: Callable[[], Any]


@dataclass
class RowTape:
    """All that a trace did with sizes. `line` gives the model's present line."""

    line: Callable[[], str]
    follows: set[fx.Node] = field(default_factory=set)  # values whose sizes may depend on the batch
    entries: list[Call | Asked | Read | CallOutcome | ModeSwitch] = field(default_factory=list)
    known: set[Any] = field(default_factory=set)

    def add(self, entry: Call | Asked | Read | CallOutcome, key: Any = None) -> None:
        if key is None or key not in self.known:
            self.known.add(key)
            self.entries.append(entry)

    def track(self, value: Any, number: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        return (TrackedFloat if isinstance(value, float) else TrackedInt)(self, value, number)

    def read(self, number: Any, value: Any) -> Any:
        key = (number, type(value), value)
        if key not in self.known:
            self.add(Read(number, value, self.line()), key)
        return value

    def answer(
        self, name: str, query: Callable[..., Any], node: fx.Node | None, args: tuple, kwargs: dict, result: Any
    ) -> Any:
        """The answer that forward gets to a query of a tensor."""
        if node not in self.follows or name not in (*_SIZES, *_FIXED):
            return result
        places = range(len(result)) if isinstance(result, tuple) else [None]
        asked = [Asked(node, query, args, place, tuple(kwargs.items())) for place in places]
        for each in asked:
            self.add(each, each)
        if name in _FIXED:
            return self.read(asked[0], result)
        if not isinstance(result, tuple):
            return self.track(result, asked[0])
        found = [self.track(size, each) for size, each in zip(result, asked)]
        return torch.Size(found) if isinstance(result, torch.Size) else tuple(found)

    def note_outcome(self, run: Callable[..., Any], args: Any, kwargs: Any, parents: list[fx.Node], value: Any) -> None:
        """Write down a call that made no tensor."""
        if has_slot((args, kwargs)) or any(parent in self.follows for parent in parents):
            self.entries.append(CallOutcome(run, args, kwargs, value, self.line()))

    def note(self, node: fx.Node, run: Callable[..., Any], args: Any, kwargs: Any, parents: list[fx.Node]) -> None:
        """Write down a call."""
        if has_slot((args, kwargs)) or any(parent in self.follows for parent in parents):
            self.follows.add(node)
        self.entries.append(Call(node, run, args, kwargs, looks_of(node.meta["val"])))


class Tracked:
    """A number of the model's Python whose origin is known."""

    tape: RowTape
    value: Any
    number: Any

    def __init__(self, tape: RowTape, value: Any, number: Any):
        self.tape, self.value, self.number = tape, value, number

    __hash__ = None  # type: ignore[assignment]  # as a key of a cache it would outlive the trace

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self

    def slot(self) -> Any:
        return (NumberSlot if isinstance(self.value, float) else SizeSlot)(self.value, self.number)


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Tracked, other: Any) -> Any:
        if not isinstance(other, (Tracked, int, float)):
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        value = function(*(plain_number(x) for x in pair))
        return self.tape.track(value, Computed(function, tuple(map(_number, pair)), type(value)))

    return method


def _comparison(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Tracked, other: Any) -> Any:
        if not isinstance(other, (Tracked, int, float)):
            return NotImplemented
        found = function(self.value, plain_number(other))
        return self.tape.read(Computed(function, (self.number, _number(other)), bool), found)

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tracked, *args: Any) -> Any:
        value = function(self.value, *args)
        return self.tape.track(value, Computed(function, (self.number, *args), type(value)))

    return method


def _read(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tracked, *args: Any) -> Any:
        self.tape.read(self.number, self.value)
        return function(self.value, *args)

    return method


def _methods() -> dict[str, Callable[..., Any]]:
    found: dict[str, Any] = {f"__{name}__": _binary(name, False) for name in _BINARY}
    found |= {f"__r{name}__": _binary(name, True) for name in _BINARY}
    found |= {f"__{name}__": _comparison(name) for name in _COMPARED}
    found |= {name: _unary(function) for name, function in _UNARY.items()}
    found |= {name: _read(function) for name, function in _READ.items()}
    return found


def _kind_of(name: str, base: type, shown: type) -> Callable[..., Any]:
    """A type that torch takes for a size, and `isinstance` for a number."""
    return type(name, (Tracked, base), {**_methods(), "__class__": property(lambda self: shown)})


TrackedInt = _kind_of("TrackedInt", torch.SymInt, int)
TrackedFloat = _kind_of("TrackedFloat", torch.SymFloat, float)


def plain_number(value: Any) -> Any:
    return value.value if isinstance(value, Tracked) else value


def _number(value: Any) -> Any:
    return value.number if isinstance(value, Tracked) else value


def settle(value: Any) -> Any:
    """A number as Python reads it."""
    return value.tape.read(value.number, value.value) if isinstance(value, Tracked) else value


def has_slot(nest: Any) -> bool:
    found: list[Any] = []
    fx.node.map_aggregate(nest, lambda leaf: found.append(leaf) if isinstance(leaf, (SizeSlot, NumberSlot)) else leaf)
    return bool(found)


def plain(nest: Any) -> Any:
    """The same arguments with plain numbers."""
    return fx.node.map_aggregate(nest, _plain)


def _plain(leaf: Any) -> Any:
    return int(leaf) if isinstance(leaf, SizeSlot) else float(leaf) if isinstance(leaf, NumberSlot) else leaf
