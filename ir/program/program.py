"""The parts of a training step: stages, values, and one program per device.

A `Program` is a `torch.fx.Graph` whose nodes call the ops of `ir/ops`. Edges are the only synchronisation: an op starts
when its inputs are ready and its stream is free; the order in the text is the issue order per stream, and the order in
which memory is taken and given back. A stage is known here only by its interface (`StageSpec`); its code is a module of
the generated file.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from .. import ops
from ..calls import op_of
from ..errors import VerifyError
from ..ops import Op
from ..plain_graph import PlainGraph
from ..stages.interface import Interface


class Program:
    """One device's step: a graph over the ops, with the interface that its names refer to.

    `function` is "step" (training) or "evaluate". The graph has one placeholder, `batch`, and one output: a dict of
    name to a list of values, for instance {"loss": [loss_m0, loss_m1]}.
    """

    def __init__(self, device: int, interface: Interface, graph: fx.Graph | None = None, function: str = "step"):
        self.device = device
        self.interface = interface
        self.function = function
        self.graph = PlainGraph() if graph is None else graph
        if graph is None:
            self.graph.placeholder("batch")

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
        graph = PlainGraph()
        copies: dict[fx.Node, fx.Node] = {}
        copied = copies.__getitem__
        for node in self.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copied)
            copy = copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
            copy.meta.update(node.meta)
            if copy.name != node.name:
                _rename(copy, node.name)
        return Program(self.device, self.interface, graph, self.function)

    def with_interface(self, **changes: Any) -> Program:
        self.interface = replace(self.interface, **changes)
        return self


def infer(program: Program, node: fx.Node, context: ops.Context | None = None) -> Any:
    """Run the op's inference on the types of its operands and store it as `node.meta["type"]`. `context`: the
    program's, where it is at hand.

    Raises `VerifyError` where the operands are not what the op takes.
    """
    context = ops.Context(program.interface, program.device) if context is None else context
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("type"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("type"))
    op = op_of(node)
    try:
        result = op.infer(context, *args, **kwargs)
    except (TypeError, KeyError, StopIteration, AttributeError, ValueError) as error:
        reason = f"unknown name {error}" if isinstance(error, KeyError) else str(error)
        raise VerifyError(f"`{op.name}` does not take these operands: {reason}", device=program.device) from error
    node.meta["type"] = result
    return result


def infer_all(program: Program) -> None:
    """Re-run inference over the whole program, as the verifier does: stale types are replaced, bad operands raise."""
    context = ops.Context(program.interface, program.device)
    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, ops.Op):
            infer(program, node, context)
        elif node.op == "call_function" and node.target is operator.getitem:
            source, index = node.args
            types = source.meta["type"]
            if not isinstance(types, tuple) or not 0 <= index < len(types):
                raise VerifyError(f"`{source.target.name}` has no result {index}", device=program.device)
            node.meta["type"] = types[index]


def work_of(program: Program, node: fx.Node) -> ops.Work:
    """The resource that the op occupies, and the amount, from the types of its operands."""
    context = ops.Context(program.interface, program.device)
    args = fx.node.map_arg(node.args, lambda n: n.meta.get("type"))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: n.meta.get("type"))
    return op_of(node).work(context, *args, **kwargs)


def values_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that stand for the values an op produces: itself, or its unpacked results, in order."""
    types = node.meta.get("type")
    if types is None:
        return []
    if isinstance(types, ops.Value):
        return [node]
    items = [user for user in node.users if user.target is operator.getitem and user.args[0] is node]
    return sorted(items, key=result_index)


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
        fx.node.map_arg(op.operand(name, node.args, node.kwargs), found.append)
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
    position = {node: i for i, node in enumerate(graph.nodes)}
    returned = {n for nodes in program.results().values() for n in nodes}
    given_away = {n for node in program.ops() for n in donated_operands(node)}
    last: dict[fx.Node, list[fx.Node]] = {}
    wrong: dict[fx.Node, None] = {}
    for node in program.ops():
        if node.target is ops.free:
            wrong[node] = None
            continue
        for value in values_of(node):
            if value in returned or value in given_away or not value.meta["type"].owned:
                continue
            users = [user for user in value.users if user.op == "call_function" and user.target is not ops.free]
            end = max([*users, node], key=lambda n: position[n])
            if end is node:  # never used: free after the unpacking
                end = max(values_of(node), key=lambda n: position[n])
            last.setdefault(end, []).append(value)
    for end, values in last.items():
        place = max([end, *values_of(end)] if isinstance(end.target, ops.Op) else [end], key=lambda n: position[n])
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
