"""The parts of a training step: stages, values, and one program per device.

A `Program` is a `torch.fx.Graph` whose nodes call the ops of `ir/ops`. Edges are the only synchronisation: an op starts
when its inputs are ready and its stream is free; the order in the text is the issue order per stream, and the order in
which memory is taken and given back. A stage is known here only by its interface (`StageSpec`); its code is a module of
the generated file.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import fx

from .. import ops
from ..calls import op_of
from ..errors import VerifyError
from ..ops import Op
from ..plain_graph import PlainGraph
from ..stages.interface import Interface

FoundOnce = TypeVar("FoundOnce")


class Program:
    """One device's step: a graph over the ops, with the interface that its names refer to.

    `function` is "step" (training) or "evaluate". The graph has one placeholder, `batch`, and one output: a dict of
    name to a list of values, for instance {"loss": [loss_m0, loss_m1]}.
    """

    def __init__(self, device: int, interface: Interface, graph: PlainGraph | None = None, function: str = "step"):
        self.device = device
        self.interface = interface
        self.function = function
        self._found: dict[Callable[[Program], Any], tuple[list[Any], Any]] = {}
        self.graph = PlainGraph() if graph is None else graph
        if graph is None:
            self.graph.placeholder("batch")

    def once(self, find: Callable[[Program], FoundOnce]) -> FoundOnce:
        """The result of `find` on the program, which is looked for once while the program stays the same."""
        now: list[Any] = [(node, node.args, node.kwargs, node.meta.get("type")) for node in self.graph.nodes]
        now.append((self.interface, self.device))
        known = self._found.get(find)
        if known is None or known[0] != now:
            known = self._found[find] = now, find(self)
        found: FoundOnce = known[1]
        return found

    @property
    def batch(self) -> fx.Node:
        first: fx.Node = next(iter(self.graph.nodes))
        return first

    def ops(self) -> Iterator[fx.Node]:
        """The nodes that call an op, in issue order."""
        return (n for n in self.graph.nodes if isinstance(n.target, Op))

    def emit(self, op: Op, *args: Any, names: Sequence[str] = (), **fields: Any) -> list[fx.Node]:
        """Append an op; return one node per value that it produces, named after `names` (made unique)."""
        node = self.graph.call_function(op, args, fields)
        return self.bind_results(node, names)

    def bind_results(self, node: fx.Node, names: Sequence[str] = ()) -> list[fx.Node]:
        """Infer the node's types and give each of its results a node of its own, right after it."""
        result = infer(self, node)
        if result is None:
            return []
        if isinstance(result, ops.Value):
            if names:
                _rename(node, names[0])
            return [node]
        values, after = [], node
        for i, value in enumerate(result):
            with self.graph.inserting_after(after):
                item = self.graph.call_function(operator.getitem, (node, i))
            item.meta["type"] = value
            if i < len(names):
                _rename(item, names[i])
            values.append(item)
            after = item
        return values

    def returns(self, results: dict[str, list[fx.Node]]) -> None:
        """Set what the step returns, in place of what it returned before."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                self.graph.erase_node(node)
        self.graph.output(results)

    def results(self) -> dict[str, list[fx.Node]]:
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                return {name: list(nodes) for name, nodes in node.args[0].items()}
        return {}

    def copy(self) -> Program:
        """A program of its own, which a pass may rewrite; types are copied, too."""
        graph = self.graph.copy_plain()
        for node, copy in zip(self.graph.nodes, graph.nodes):
            call = node.meta.get("call")
            if call is not None and call.is_of(node, self):
                found = call.kinds, call.result, call.work
                copy.meta["call"] = _Call(call.interface, call.device, copy.args, copy.kwargs, *found)
        return Program(self.device, self.interface, graph, self.function)

    def with_interface(self, **changes: Any) -> Program:
        self.interface = replace(self.interface, **changes)
        return self


@dataclass(slots=True)
class _Call:
    """The operands of an op, and what was found of it for these operands."""

    interface: Interface
    device: int
    args: tuple[Any, ...]  # of the node, which gets other ones where it is changed
    kwargs: dict[str, Any]
    kinds: list[Any]  # the types of the nodes among them
    result: Any = ...  # its type; `...` where it was not inferred
    work: ops.Work | None = None

    def is_of(self, node: fx.Node, program: Program) -> bool:
        """Whether the node still has these operands, of whatever types, in a program like the one before."""
        same = self.args is node.args and self.kwargs is node.kwargs
        return same and self.interface is program.interface and self.device == program.device


def _call(program: Program, node: fx.Node) -> _Call:
    """The record of a node's op for its operands as they are now."""
    kinds = [operand.meta.get("type") for operand in node._input_nodes]
    known: _Call | None = node.meta.get("call")
    if known is not None and known.is_of(node, program) and all(map(operator.is_, known.kinds, kinds)):
        return known
    known = node.meta["call"] = _Call(program.interface, program.device, node.args, node.kwargs, kinds)
    return known


def _type_of(node: fx.Node) -> Any:
    return node.meta.get("type")


def infer(program: Program, node: fx.Node) -> Any:
    """Run the op's inference on the types of its operands, unless that was done, and store it as `node.meta["type"]`.

    Raises `VerifyError` where the operands are not what the op takes.
    """
    call, op = _call(program, node), op_of(node)
    if call.result is ...:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _type_of)
        try:
            call.result = op.infer(ops.Context(program.interface, program.device), *args, **kwargs)
        except (TypeError, KeyError, StopIteration, AttributeError, ValueError) as error:
            reason = f"unknown name {error}" if isinstance(error, KeyError) else str(error)
            raise VerifyError(f"`{op.name}` does not take these operands: {reason}", device=program.device) from error
    node.meta["type"] = call.result
    return call.result


def infer_all(program: Program) -> None:
    """Re-run inference over the whole program, as the verifier does: stale types are replaced, bad operands raise."""
    for node in program.graph.nodes:
        if isinstance(node.target, Op):
            infer(program, node)
        elif node.target is operator.getitem:
            source, index = node.args
            types = source.meta["type"]
            if not isinstance(types, tuple) or not 0 <= index < len(types):
                raise VerifyError(f"`{source.target.name}` has no result {index}", device=program.device)
            node.meta["type"] = types[index]


def work_of(program: Program, node: fx.Node) -> ops.Work:
    """The resource that the op occupies, and the amount, from the types of its operands."""
    call = _call(program, node)
    if call.work is None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _type_of)
        call.work = op_of(node).work(ops.Context(program.interface, program.device), *args, **kwargs)
    return call.work


def values_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the values an op produces: itself, or its unpacked results, in order."""
    types = node.meta.get("type")
    if types is None:
        return []
    if isinstance(types, ops.Value):
        return [node]
    items = [user for user in node.users if user.target is operator.getitem]
    return sorted(items, key=result_index) if len(items) > 1 else items


def result_index(item: fx.Node) -> int:
    """The index of the op's result that a node stands for, where there are several."""
    index = item.args[1]
    assert isinstance(index, int)
    return index


def producer_of(value: fx.Node) -> fx.Node:
    """The op that produces a value, which may be one of several results."""
    producer = value.args[0] if value.target is operator.getitem else value
    assert isinstance(producer, fx.Node)
    return producer


def micro_batch_of(node: fx.Node) -> int:
    """The micro-batch that an op works on, as its field says."""
    number = node.kwargs["micro_batch"]
    assert isinstance(number, int)
    return number


def link_turn_of(node: fx.Node) -> int | None:
    """The turn of a fetch on the link that it shares with others; None for other ops, and fetches without one."""
    number = node.kwargs.get("link_turn") if node.target is ops.fetch else None
    return number if isinstance(number, int) else None


def takes_turns(program: Program) -> bool:
    """Whether some of its fetches wait for their turns on a link."""
    return any(link_turn_of(node) is not None for node in program.ops())


def donated_operands(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the op takes over: they are dead after it and need no `free`."""
    op = op_of(node)
    if not op.donates:
        return []
    found: list[fx.Node] = []
    for name in op.donates:
        given = op.operand(name, node.args, node.kwargs)
        each = given if isinstance(given, list | tuple) else (given,)
        found += [value for value in each if isinstance(value, fx.Node)]
    return found


def operands(node: fx.Node) -> list[fx.Node]:
    """The values an op reads, in order, without the batch."""
    return [n for n in node.all_input_nodes if n.op != "placeholder"]


def place_frees(program: Program) -> None:
    """Put one `free` after the last use of every value that the program owns, in place of all older frees, of which
    those that are right stay.

    Values freed at the same place share one op. Results, donated values and resident weights are not freed.
    """
    graph = program.graph
    returned = {n for nodes in program.results().values() for n in nodes}
    given_away: set[fx.Node] = set()
    last: dict[fx.Node, fx.Node] = {}  # per value the op that reads it last
    wrong: dict[fx.Node, None] = {}
    rows = list(program.ops())
    for node in rows:
        if node.target is ops.free:
            wrong[node] = None
        else:
            last.update(dict.fromkeys(node._input_nodes, node))
            given_away.update(donated_operands(node))
    ends: dict[fx.Node, list[fx.Node]] = {}
    for node in rows:
        values = values_of(node) if node not in wrong else []
        for value in values:
            if value not in returned and value not in given_away and value.meta["type"].owned:
                ends.setdefault(last.get(value) or max(values), []).append(value)  # if never used, after the unpacking
    for end, values in ends.items():
        place = max([end, *values_of(end)]) if isinstance(end.target, Op) else end
        if place.next in wrong and place.next.args == tuple(values):
            del wrong[place.next]
            continue
        with graph.inserting_after(place):
            graph.call_function(ops.free, tuple(values))
    for node in wrong:
        graph.erase_node(node)


def _rename(node: fx.Node, name: str) -> None:
    if node.name != name:
        node._rename(name)
