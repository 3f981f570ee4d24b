"""One record for each operator of torch that is known, and a call of one as the rules see it.

The records are at the end of the files beside this one, after the rules that they name. A further operator is one
record there. Operators that torch decomposes before a dispatch mode sees them need none."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ...ir.machine.call_mix import AttentionCall, Product
from ..opgraph import value_tensors
from .states import ByRow, Free, Kind, Mixed, OverRows, Permutation, RowState, Scale, whole


class Watcher(Protocol):
    """The follower of rows: knows states so far, and is told what rules find."""

    rows: int
    is_clear: bool

    def state(self, tensor: torch.Tensor) -> RowState: ...
    def note(self, kind: Kind) -> None: ...
    def scale(self, number: float) -> Scale: ...
    def new_order(self) -> int: ...


@dataclass(frozen=True)
class GpuSize:
    """The number of a GPU's multiprocessors, and of threads that each of them holds."""

    processors: int
    threads: int


_VALUES = ("Tensor", "number", "float", "Optional[number]", "Optional[float]")  # types of arguments in a schema
LARGEST = GpuSize(132, 2048)  # an H100 or H200


class OperatorCall:
    """A call of one of torch's operators: arguments by the names of its schema, and the result."""

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, gpu: GpuSize = LARGEST):
        self.func, self.out, self.gpu = func, out, gpu
        names = [argument.name for argument in func._schema.arguments]
        defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
        self.given: dict[str, Any] = {**defaults, **dict(zip(names, args)), **kwargs}
        self.name = operator_name(func)

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def tensor(self, name: str) -> torch.Tensor:
        value = self.given[name]
        assert isinstance(value, torch.Tensor), name
        return value

    def tensors(self) -> Iterator[torch.Tensor]:
        """Its tensor arguments."""
        for value in self.given.values():
            yield from value_tensors(value)

    def numbers(self) -> list[float]:
        """The plain numbers among its arguments that are values, not sizes or places; none for a call that makes a new
        value, as sizes are such numbers there."""
        if not any(True for _ in self.tensors()):
            return []
        values = [arg.name for arg in self.func._schema.arguments if str(arg.type) in _VALUES]
        return [self.given[name] for name in values if isinstance(self.given[name], (int, float))]

    def results(self) -> list[torch.Tensor]:
        return list(value_tensors(self.out))


class RowCall(OperatorCall):
    """A call, and the states of its tensors."""

    def __init__(self, watcher: Watcher, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any):
        super().__init__(func, args, kwargs, out)
        self.watcher, self.rows = watcher, watcher.rows

    def state(self, name: str) -> RowState:
        """The state of a tensor argument; that of a number or None is `Free`."""
        value = self.given[name]
        return self.watcher.state(value) if isinstance(value, torch.Tensor) else Free()

    def tensor_state(self, tensor: torch.Tensor) -> RowState:
        return self.watcher.state(tensor)

    def mix(self, kind: Kind) -> Mixed:
        """The state of a result in which rows meet."""
        self.watcher.note(kind)
        return Mixed()

    def unclear(self) -> Mixed:
        """The state of a result that only a micro-batch of more than one row would show."""
        self.watcher.is_clear = False
        return Mixed()


class Elements(enum.Enum):
    """The elements of its first operand that a result has."""

    SAME = "same"  # all in their places, perhaps as another type
    RESHAPED = "reshaped"  # all in their order, in another shape
    MOVED = "moved"  # all, in another order of dimensions
    SPREAD = "spread"  # each once or several times
    PART = "part"  # some of them
    JOINED = "joined"  # all, beside those of other operands
    PICKED = "picked"  # some by their numbers, each once or several times
    NONE = "none"  # none: it has the shape or the type of the operand


RowRule = Callable[[RowCall], "RowState | list[RowState]"]
WorkspaceRule = Callable[[OperatorCall], int]
KernelRule = Callable[[OperatorCall], tuple[Product | AttentionCall, ...]]


@dataclass(frozen=True)
class Operator:
    """Knowledge of one of torch's operators. None stands for "not known": who needs it refuses.

    `rows`: the states of its results, by those of its operands. `elements`: what its only result has of its first
    operand. `workspace`: the bytes that its kernel on CUDA holds beside operands and results. `kernel`: the products or
    the attention that a call is, none for one that moves nothing; where it is not known, a call counts by its bytes."""

    rows: RowRule | None = None
    elements: Elements | None = None
    workspace: WorkspaceRule | None = None
    kernel: KernelRule | None = None


OPERATORS: dict[str, Operator] = {}
UNKNOWN = Operator()


def record(*names: str, **known: Any) -> None:
    """Enter one record for each operator of these names. In-place forms have the name without the underscore, operators
    that are not torch's own have their namespace before it."""
    for name in names:
        assert name not in OPERATORS, name
        OPERATORS[name] = Operator(**known)


def nothing(call: OperatorCall) -> int:
    """The workspace of a kernel that only reads operands and writes results."""
    return 0


def operator_of(func: Any) -> Operator:
    return OPERATORS.get(record_name(func), UNKNOWN)


@functools.cache
def record_name(func: Any) -> str:
    """The name of an operator's record: `aten::add_` is "add", since it gives the same, wherever that is written."""
    namespace = str(func._schema.name).rpartition("::")[0]
    return operator_name(func) if namespace == "aten" else str(func._schema.name)


def no_record(operator: str, source: str) -> str:
    """The refusal of an operator of which nothing is known. `source`: the user's line."""
    at = f" at {source}" if source else ""
    return f"nothing is known of {operator}{at}: give it a record, the entry point {operator!r} of penstock.operators"


@functools.cache
def operator_name(func: Any) -> str:
    """The name of an operator without its namespace, without the underscore of an in-place form, and that of the view
    for one that copies a view."""
    name = str(func._schema.name).rpartition("::")[2]
    if torch.Tag.view_copy in func.tags:
        name = name.removesuffix("_copy")
    return name if name.startswith("__") else name.rstrip("_")


@functools.cache
def is_pointwise(func: Any) -> bool:
    """Whether torch marks an operator as pointwise, or the operator of which it is the in-place form."""
    packet = getattr(getattr(torch.ops, func.namespace), operator_name(func), None)
    other = getattr(packet, func._overloadname, func)
    return torch.Tag.pointwise in func.tags or torch.Tag.pointwise in other.tags


def plain(state: RowState) -> RowState:
    """The state after an operation that is not linear but keeps each element's row."""
    if isinstance(state, ByRow):
        return replace(state, scale=Scale(), step=0)
    if isinstance(state, Free):
        return Free(varies=state.varies, scale=Scale(unsure=state.scale != Scale()))
    return state


def constants(call: RowCall) -> list[RowState]:
    """The states of results that no row has any influence on, whose elements all may differ."""
    return [Free(varies=whole(range(tensor.dim()))) for tensor in call.results()]


def nonlinear(call: RowCall, *states: RowState) -> Mixed | None:
    """The result's state if one of `states` is no value of single rows, so that any nonlinear function of it mixes."""
    if any(isinstance(state, Mixed) for state in states):
        return Mixed()
    if any(isinstance(state, OverRows) for state in states):
        return call.mix(Kind.NONLINEAR)
    return call.mix(Kind.ACROSS) if any(isinstance(state, Permutation) for state in states) else None
