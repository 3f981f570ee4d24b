"""One trace for every number of rows: what forward asks of sizes is followed, and the calls run again at other sizes.

In: a trace at one number of rows, whose forward gets a `Tracked` number for each size of a tensor that depends on the
batch. Out: the same graph for a batch with other rows, with the numbers that follow from its sizes. Whatever Python
reads of such a number (a branch, a loop, a text, `int()`) is written down, and must be the same at the other sizes:
else `OtherTrace` says where, and the model is traced again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...ir.errors import CaptureError

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_UNARY: dict[str, Callable[..., Any]] = {
    "__neg__": operator.neg, "__pos__": operator.pos, "__abs__": abs, "__round__": round, "__floor__": math.floor,
    "__ceil__": math.ceil, "__trunc__": math.trunc,
}  # fmt: skip
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
_READ: dict[str, Callable[..., Any]] = {
    "__bool__": bool, "__int__": int, "__index__": operator.index, "__float__": float, "__hash__": hash,
    "__repr__": repr, "__str__": str, "__format__": format,
}  # fmt: skip
_SIZES = ("shape", "size", "numel", "nelement", "stride", "storage_offset", "nbytes")
_FIXED = ("dim", "ndimension", "ndim", "__len__", "is_contiguous")
_RESHAPING = ("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_")


class OtherTrace(CaptureError):
    """The model does something else for other rows."""


class Slot(int):
    """A number among the arguments of a traced call, and the one that it is made of."""

    number: Any

    def __new__(cls, value: int, number: Any) -> Slot:
        made = super().__new__(cls, value)
        made.number = number
        return made


class FloatSlot(float):
    """The same for one that is not whole."""

    number: Any

    def __new__(cls, value: float, number: Any) -> FloatSlot:
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
    """What a function gives for numbers."""

    function: Callable[..., Any]
    operands: tuple


@dataclass
class Call:
    """A recorded call. `tape` has it in the order in which it ran."""

    node: fx.Node
    run: Callable[..., Any]
    args: Any
    kwargs: Any


@dataclass
class Read:
    """A value that Python has read, and where."""

    number: Any
    value: Any
    line: str


@dataclass
class Outcome:
    """What a call gave that made no tensor, and where."""

    run: Callable[..., Any]
    args: Any
    kwargs: Any
    value: Any
    line: str


@dataclass
class Mode:
    """A mode that is switched."""

    switch: Callable[[], Any]


@dataclass
class RowTape:
    """All that a trace did with sizes. `line` gives the model's present line."""

    line: Callable[[], str]
    follows: set[fx.Node] = field(default_factory=set)  # values whose sizes may depend on the batch
    entries: list[Call | Asked | Read | Outcome | Mode] = field(default_factory=list)
    known: set[Any] = field(default_factory=set)

    def add(self, entry: Call | Asked | Read | Outcome, key: Any = None) -> None:
        if key is None or key not in self.known:
            self.known.add(key)
            self.entries.append(entry)

    def tracked(self, value: Any, number: Any) -> Any:
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
        """What forward gets for a query of a tensor."""
        if node not in self.follows or name not in (*_SIZES, *_FIXED):
            return result
        places = range(len(result)) if isinstance(result, tuple) else [None]
        asked = [Asked(node, query, args, place, tuple(kwargs.items())) for place in places]
        for each in asked:
            self.add(each, each)
        if name in _FIXED:
            return self.read(asked[0], result)
        if not isinstance(result, tuple):
            return self.tracked(result, asked[0])
        found = [self.tracked(size, each) for size, each in zip(result, asked)]
        return torch.Size(found) if isinstance(result, torch.Size) else tuple(found)

    def note_outcome(self, run: Callable[..., Any], args: Any, kwargs: Any, parents: list[fx.Node], value: Any) -> None:
        """Write down a call that made no tensor."""
        if has_slot((args, kwargs)) or any(parent in self.follows for parent in parents):
            self.entries.append(Outcome(run, args, kwargs, value, self.line()))

    def note(self, node: fx.Node, run: Callable[..., Any], args: Any, kwargs: Any, parents: list[fx.Node]) -> None:
        """Write down a call."""
        name = getattr(node.target, "__name__", node.target)
        if name in _RESHAPING:
            raise OtherTrace(f"{self.line()}\n  {name} changes the shape of a tensor in place")
        if has_slot((args, kwargs)) or any(parent in self.follows for parent in parents):
            self.follows.add(node)
        self.entries.append(Call(node, run, args, kwargs))


class Tracked:
    """A number of the model's Python whose origin is known."""

    tape: RowTape
    value: Any
    number: Any

    def __init__(self, tape: RowTape, value: Any, number: Any):
        self.tape, self.value, self.number = tape, value, number

    def slot(self) -> Any:
        return (FloatSlot if isinstance(self.value, float) else Slot)(self.value, self.number)


def _binary(name: str, reflected: bool) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Tracked, other: Any) -> Any:
        if not isinstance(other, (Tracked, int, float)):
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        value = function(*(untracked(x) for x in pair))
        return self.tape.tracked(value, Computed(function, tuple(_number(x) for x in pair)))

    return method


def _compared(name: str) -> Callable[..., Any]:
    function = getattr(operator, name)

    def method(self: Tracked, other: Any) -> Any:
        if not isinstance(other, (Tracked, int, float)):
            return NotImplemented
        return self.tape.read(
            Computed(function, (self.number, _number(other))), function(self.value, untracked(other))
        )

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tracked, *args: Any) -> Any:
        return self.tape.tracked(function(self.value, *args), Computed(function, (self.number, *args)))

    return method


def _read(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Tracked, *args: Any) -> Any:
        self.tape.read(self.number, self.value)
        return function(self.value, *args)

    return method


def _methods() -> dict[str, Callable[..., Any]]:
    found: dict[str, Any] = {f"__{name}__": _binary(name, False) for name in _BINARY}
    found |= {f"__r{name}__": _binary(name, True) for name in _BINARY}
    found |= {f"__{name}__": _compared(name) for name in _COMPARED}
    found |= {name: _unary(function) for name, function in _UNARY.items()}
    found |= {name: _read(function) for name, function in _READ.items()}
    return found


# Torch takes these for sizes, and Python for numbers.
def _kind_of(name: str, base: type, shown: type) -> Callable[..., Any]:
    return type(name, (Tracked, base), {**_methods(), "__class__": property(lambda self: shown)})


TrackedInt = _kind_of("TrackedInt", torch.SymInt, int)
TrackedFloat = _kind_of("TrackedFloat", torch.SymFloat, float)


def untracked(value: Any) -> Any:
    return value.value if isinstance(value, Tracked) else value


def _number(value: Any) -> Any:
    return value.number if isinstance(value, Tracked) else value


def settled(value: Any) -> Any:
    """A number as Python reads it."""
    return value.tape.read(value.number, value.value) if isinstance(value, Tracked) else value


def has_slot(nest: Any) -> bool:
    found: list[Any] = []
    fx.node.map_aggregate(nest, lambda leaf: found.append(leaf) if isinstance(leaf, (Slot, FloatSlot)) else leaf)
    return bool(found)


def plain(nest: Any) -> Any:
    """The same arguments with plain numbers."""
    return fx.node.map_aggregate(nest, _plain)


def _plain(leaf: Any) -> Any:
    return int(leaf) if isinstance(leaf, Slot) else float(leaf) if isinstance(leaf, FloatSlot) else leaf


class RowReplay:
    """The calls of a tape at other sizes. `values`: of each node, first of those that no call makes."""

    def __init__(self, values: dict[fx.Node, Any], items: dict[fx.Node, list[tuple[fx.Node, Any]]]):
        self.values, self.items = values, items
        self.answers: dict[Any, Any] = {}
        self.alias: dict[fx.Node, fx.Node | None] = {}  # where results share other memory than in the trace

    def run(self, tape: RowTape) -> None:
        """Raises `OtherTrace` where the model does something else at these sizes."""
        for entry in tape.entries:
            if isinstance(entry, Call):
                self.call(entry)
            elif isinstance(entry, Mode):
                entry.switch()
            elif isinstance(entry, Asked):
                answer = entry.query(self.values[entry.node], *entry.args, **dict(entry.kwargs))
                self.answers[entry] = answer if entry.place is None else answer[entry.place]
            elif isinstance(entry, Outcome):
                args, kwargs = self.arguments(entry)
                if not _same(entry.run(*args, **kwargs), entry.value):
                    raise OtherTrace(f"{entry.line}\n  this line gives something else for other rows")
            elif not _same(self.of(entry.number), entry.value):
                raise OtherTrace(
                    f"{entry.line}\n  the model does something else for other rows: a number is {entry.value!r} here "
                    f"and {self.of(entry.number)!r} there"
                )

    def of(self, number: Any) -> Any:
        if isinstance(number, Computed):
            if number not in self.answers:
                self.answers[number] = number.function(*map(self.of, number.operands))
            return self.answers[number]
        return self.answers[number] if isinstance(number, Asked) else number

    def at(self, nest: Any) -> Any:
        """Arguments with the numbers of these sizes."""
        return fx.node.map_aggregate(
            nest, lambda leaf: self.of(leaf.number) if isinstance(leaf, (Slot, FloatSlot)) else leaf
        )

    def call(self, entry: Call) -> None:
        node, before = entry.node, entry.node.meta["val"]
        args, kwargs = self.arguments(entry)
        given = list(_tensors((args, kwargs)))
        found = entry.run(*args, **kwargs)
        if isinstance(found, torch.Tensor) and not node.meta["mutates"] and any(found is value for value in given):
            found = found.view_as(found)
        was = list(_tensors(fx.map_arg((entry.args, entry.kwargs), lambda n: n.meta["val"])))
        if _shares([*given, *_tensors(found)]) == _shares([*was, *_tensors(before)]):
            pass
        elif isinstance(found, torch.Tensor) and _shares(given) == _shares(was):  # contiguous() of one row is no copy
            self.alias[node] = self.owner(entry, found)
        else:
            raise OtherTrace(f"{node.meta['source']}\n  {node.target} shares memory with other values for other rows")
        self.bind(node, found, before)

    def owner(self, entry: Call, found: torch.Tensor) -> fx.Node | None:
        """The first argument whose memory a result shares."""
        nodes: list[fx.Node] = []
        fx.map_arg((entry.args, entry.kwargs), nodes.append)
        alike = (n for n in nodes if any(len(set(_shares([found, t]))) == 1 for t in _tensors(self.value(n))))
        return next(alike, None)

    def arguments(self, entry: Call | Outcome) -> Any:
        return fx.map_arg((self.at(entry.args), self.at(entry.kwargs)), self.value)

    def value(self, node: fx.Node) -> Any:
        return self.values.get(node, node.meta["val"])

    def bind(self, node: fx.Node, found: Any, before: Any) -> None:
        made, was = list(_tensors(found)), list(_tensors(before))
        if [_look(t) for t in made] != [_look(t) for t in was]:
            raise OtherTrace(f"{node.meta['source']}\n  {node.target} gives other values for other rows")
        self.values[node] = found
        for child, key in self.items.get(node, ()):
            self.bind(child, found[key], before[key])


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and a == b


def _look(tensor: torch.Tensor) -> tuple:
    return tensor.dim(), tensor.dtype, tensor.requires_grad


def _shares(tensors: list[torch.Tensor]) -> list[int]:
    storages = [int(t.untyped_storage()._cdata) for t in tensors]
    return [storages.index(storage) for storage in storages]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


@contextmanager
def lent_again(saved: list[tuple[Any, dict[str, Any]]]) -> Iterator[None]:
    """Modules with the attributes that they had in the trace."""
    before = [(module, dict(module.__dict__)) for module, _ in saved]
    grad = torch.is_grad_enabled()
    try:
        for module, attributes in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        with torch.enable_grad():
            yield
    finally:
        torch._C._set_grad_enabled(grad)
        for module, attributes in before:
            module.__dict__.clear()
            module.__dict__.update(attributes)
