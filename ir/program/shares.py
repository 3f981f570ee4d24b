"""Unequal shares: the program of a lane that has fewer micro-batches than others.

A plan's programs are those of the lanes with the most micro-batches. A lane with fewer runs the same text without the
turns of the micro-batches that it lacks, and without what serves only these: their messages, transfers and gathers. So
lanes still meet in the same collectives in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from .. import ops
from ..calls import op_of
from .program import Program, infer_all

SUMS = {ops.backward: "grads", ops.backward_weight: "grads", ops.reduce_scatter: "total"}  # op -> the sum it adds to
Instead = dict[fx.Node, fx.Node | None]  # what is left out -> the sum without it, if it was one


def first_micro_batches(program: Program, count: int) -> Program:
    """A copy of a lane's program with its first `count` micro-batches only. One that has no more is only copied."""
    found = program.copy()
    nodes = list(found.graph.nodes)
    if all(_number(node) < count for node in nodes):
        return found
    had_readers = {node for node in nodes if _readers(node)}
    instead: Instead = {}
    for node in nodes:
        if node.op == "call_function":
            _look_at(node, count, instead)
        elif node.op == "output":
            node.args = ({name: _left(given, instead) for name, given in node.args[0].items()},)
    for node in reversed(nodes):
        # An op that stays has a name for each of its results, such as gradients of a stage without parameters.
        results = list(node.all_input_nodes[0].users) if node.target is operator.getitem else [node]
        is_unread = all(value in had_readers and not _readers(value) for value in results)
        if node in instead or (is_unread and node.op == "call_function"):
            for free in list(node.users):
                free.args = tuple(value for value in free.args if value is not node)
            found.graph.erase_node(node)
    for node in [node for node in found.ops() if node.target is ops.free and not node.args]:
        found.graph.erase_node(node)
    infer_all(found)
    return found


def share_of(programs: Sequence[Program], count: int) -> list[Program]:
    """The programs of a lane with `count` micro-batches, which is the number of their interface, too."""
    return [first_micro_batches(program, count).with_interface(micro_batches=count) for program in programs]


def _look_at(node: fx.Node, count: int, instead: Instead) -> None:
    """Leave a node out, or give it the sums without what is left out."""
    if node.target is ops.free:
        node.args = tuple(dict.fromkeys(_left(node.args, instead)))
        return
    gone = [value for value in node.all_input_nodes if value in instead]
    if _number(node) >= count:
        instead[node] = _sum_before(node, instead)
    elif gone and node.target is operator.getitem:
        is_sum = node.meta["type"].kind == "grads"
        instead[node] = _sum_before(gone[0], instead) if is_sum else None
    elif gone and node.target is ops.add:
        left = _left(node.args, instead)
        if len(left) == 1:
            instead[node] = left[0]
        elif not left:
            instead[node] = None
        else:
            node.args = tuple(left)
    elif gone:
        total = _total(node)
        if total in gone and _live(total, instead) is None:
            _drop_total(node)
            gone.remove(total)
        if any(_live(value, instead) is None for value in gone):
            instead[node] = _sum_before(node, instead)
        for value in gone if node not in instead else ():
            replacement = _live(value, instead)
            assert replacement is not None
            node.replace_input_with(value, replacement)


def _number(node: fx.Node) -> int:
    """The micro-batch that an op names; -1 if it names none."""
    number = node.kwargs.get("micro_batch", -1)
    assert isinstance(number, int)
    return number


def _readers(node: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if user.target is not ops.free]


def _live(value: fx.Node | None, instead: Instead) -> fx.Node | None:
    while value is not None and value in instead:
        value = instead[value]
    return value


def _left(values: Iterable[Any], instead: Instead) -> list[fx.Node]:
    """The values that remain; sums are without the summands left out."""
    return [found for value in values if (found := _live(value, instead)) is not None]


def _total(node: fx.Node) -> fx.Node | None:
    """The sum that an op adds to."""
    name = SUMS.get(node.target)  # type: ignore[call-overload]
    total = op_of(node).bind(node.args, node.kwargs)[name] if name else None
    assert total is None or isinstance(total, fx.Node)
    return total


def _sum_before(node: fx.Node, instead: Instead) -> fx.Node | None:
    return _live(_total(node), instead)


def _drop_total(node: fx.Node) -> None:
    op = op_of(node)
    name = SUMS[op]
    node.args = node.args[: list(op.signature.parameters).index(name)]
    node.kwargs = {key: value for key, value in node.kwargs.items() if key != name}
