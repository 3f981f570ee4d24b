"""Questions about a node of an op graph, answered by the records of the operators that it calls.

In: a node. It is run once more on the fake tensors that it was recorded with; functions of torch need no names here.
Answers are kept for calls that are alike, in any graph of the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from ...runtime.functions import chunked_cross_entropy, part_statistics
from ...runtime.torch_names import FakeTensor, TorchDispatchMode
from ..opgraph import OpGraph, value_tensors
from .record import UNKNOWN, Elements, OperatorCall, is_pointwise, no_record, operator_name, record_name
from .table import operator_of

Known = TypeVar("Known")
NO_ELEMENTS = (-1, frozenset[Elements]())
IN_PIECES = (chunked_cross_entropy, part_statistics)  # each piece calls the same operators


class CallRecorder(TorchDispatchMode):
    """Records calls of operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # a query of a tensor's device or layout
            self.calls.append(OperatorCall(func, args, kwargs or {}, out))
        return out


@dataclass(frozen=True)
class Rerun:
    """A node's call on fake tensors like those that it was recorded with: these, by node, the value that it gives, and
    the calls of operators that make it."""

    operands: dict[fx.Node, Any]
    value: Any
    calls: list[OperatorCall]


def run_again(node: fx.Node, dtypes: Mapping[fx.Node, torch.dtype] | None = None) -> Rerun | None:
    """None for what is no call of a function, and for one that works only while it is traced. `dtypes`: types of
    operands in place of their own."""
    fakes = (t for n in (node, *node.all_input_nodes) for t in value_tensors(n.meta.get("val")))
    mode = next((t.fake_mode for t in fakes if isinstance(t, FakeTensor)), None)
    if node.op not in ("call_function", "call_method") or mode is None:
        return None
    with torch.no_grad(), torch.random.fork_rng(devices=[]), mode:
        operands = {n: n.meta["val"] for n in node.all_input_nodes}
        operands |= {n: operands[n].to(dtype) for n, dtype in (dtypes or {}).items()}
        args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
        more = {"pieces": _first_piece} if node.target in IN_PIECES else {}
        call: Any = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
        with CallRecorder() as recorder:
            try:
                value = call(*args[node.op == "call_method" :], **kwargs, **more)
            except Exception:  # of any kind, by what the user calls
                return None
    return Rerun(operands, value, recorder.calls)


def _first_piece(total: int, size: int) -> Iterator[slice]:
    yield slice(0, min(size, total))


def operators(graph: OpGraph, node: fx.Node) -> tuple[Any, ...] | None:
    """The operators that a node calls, in order; None where that is not known."""

    def find() -> tuple[Any, ...] | None:
        again = run_again(node)
        return None if again is None else tuple(call.func for call in again.calls)

    return alike(graph, node, operators, find)


def only_operator(graph: OpGraph, node: fx.Node) -> str:
    """The name of the operator that is all that a node calls; "" where there are others, or it is not known."""
    called = operators(graph, node) or ()
    return operator_name(called[0]) if len(called) == 1 else ""


def unknown_call(graph: OpGraph, node: fx.Node) -> str:
    """The refusal of a node that calls an operator without a record; empty for any other node."""
    unknown = (func for func in operators(graph, node) or () if operator_of(func) is UNKNOWN)
    names = (record_name(func) for func in unknown if not func.is_view and not is_pointwise(func))
    name = next(names, "")
    return no_record(name, str(node.meta.get("source", ""))) if name else ""


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


def alike(graph: OpGraph, node: fx.Node, question: Hashable, find: Callable[[], Known]) -> Known:
    """The answer to a question about a node, which is found once for all calls that are alike. It names no nodes."""
    numbers = {id(t): i for i, n in enumerate(node.all_input_nodes) for t in value_tensors(n.meta["val"])}

    def look(tensor: Tensor) -> Hashable:
        return tuple(tensor.shape), tensor.stride(), tensor.dtype, numbers.get(id(tensor))

    call = call_key(graph, node, node.args, node.kwargs, look)
    if call is None:
        return find()
    if (call, question) not in graph.answers:
        graph.answers[call, question] = find()
    answer: Known = graph.answers[call, question]
    return answer


def copied_operand(graph: OpGraph, node: fx.Node, *ways: Elements) -> fx.Node | None:
    """The operand whose elements are a node's value, if all operators on the way between the two give elements in these
    ways; None for any other node."""
    operand, used = _origin(graph, node)
    return operand if used.issubset(ways) else None


def unread_operand(graph: OpGraph, node: fx.Node) -> fx.Node | None:
    """The operand of which a node's value has the shape or the type alone; None for any other node, such as of random
    numbers or with other arguments in evaluation, which may read all of it."""
    operand, used = _origin(graph, node)
    is_same = not node.meta.get("random") and "eval_args" not in node.meta
    return operand if Elements.NONE in used and is_same else None


def result_dtype(graph: OpGraph, node: fx.Node, dtype: torch.dtype) -> torch.dtype | None:
    """The type of a node's tensor if the operand that it copies had this type, or all operands of a call that computes;
    None where that is not known."""

    def find() -> torch.dtype | None:
        copied = copied_operand(graph, node, Elements.SAME)
        values = {n: n.meta["val"] for n in (node.all_input_nodes if copied is None else [copied])}
        tensors = [n for n, v in values.items() if isinstance(v, Tensor) and v.is_floating_point()]
        again = run_again(node, dict.fromkeys(tensors, dtype))
        return again.value.dtype if again is not None and isinstance(again.value, Tensor) else None

    return alike(graph, node, (result_dtype, dtype), find)


def is_form(graph: OpGraph, node: fx.Node) -> bool:
    """Whether a value has all elements of its first operand, and of no others than those put together with it."""
    ways = (Elements.SAME, Elements.RESHAPED, Elements.MOVED, Elements.SPREAD, Elements.JOINED)
    return copied_operand(graph, node, *ways) is not None


def _origin(graph: OpGraph, node: fx.Node) -> tuple[fx.Node | None, frozenset[Elements]]:
    """The operand that all of a node's value comes from, if there is one, and in what ways."""
    if node.op not in ("call_function", "call_method") or node.meta["mutates"] or not node.all_input_nodes:
        return None, frozenset()
    number, used = alike(graph, node, _elements, lambda: _elements(node))
    return node.all_input_nodes[number] if number >= 0 else None, used


def names_sizes(graph: OpGraph, node: fx.Node) -> bool:
    """Whether numbers in a call may be sizes of its result, as it reshapes or repeats a value, or makes a constant."""
    told = [*node.args[1:], *node.kwargs.values()]
    has_numbers = any(type(item) is int or isinstance(item, (tuple, list)) for item in told)
    ways = (Elements.SAME, Elements.RESHAPED, Elements.SPREAD, Elements.NONE)
    return has_numbers and copied_operand(graph, node, *ways) is not None


def _elements(node: fx.Node) -> tuple[int, frozenset[Elements]]:
    """The number of the operand whose elements a node's value has, and in what ways; -1 where that is not known."""
    again = run_again(node)
    if again is None:
        return NO_ELEMENTS
    operands = {id(value): number for number, value in enumerate(again.operands.values())}
    made: dict[int, tuple[frozenset[Elements | None], Tensor | None]] = {}  # result -> ways and first operand
    for call in again.calls:
        operand = next(call.tensors(), None)
        ways, before = made.get(id(call.out), (frozenset(), None)) if operand is call.out else (frozenset(), operand)
        made[id(call.out)] = ways | {operator_of(call.func).elements}, before
    tensor, used = again.value, frozenset[Elements | None]()
    while id(tensor) not in operands and id(tensor) in made:
        ways, tensor = made[id(tensor)]
        used |= ways
    known = frozenset(way for way in used if way is not None)
    return (operands[id(tensor)], known) if len(known) == len(used) and id(tensor) in operands else NO_ELEMENTS
