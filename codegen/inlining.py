"""Finds ops that go inside the statement of another op: ops of one source line, which the user wrote as one, too.

In: steps of a function body in order. Out: the nodes without a statement of their own. The order of evaluation never
changes: Python evaluates operands from left to right, so an op may go inside its reader only if, from left to right,
every op comes in recorded order. What a line does not need afterwards is freed by that line, as in the user's code.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..ir.edges import reads
from .expressions import IN_PLACE
from .names import code_of
from .segments import mode_of

MAX_OPS = 9  # in one statement


def nodes_to_inline(steps: Sequence[Any], readers: dict[fx.Node, list[Any]], apart: set[Any]) -> set[fx.Node]:
    """Nodes to be printed inside their only reader. `readers`: per node, every use (a step, or an output).

    Operands of the steps in `apart` get statements of their own.
    """
    chosen: set[fx.Node] = set()
    ops: dict[fx.Node, int] = {}
    waiting: list[fx.Node] = []  # candidates whose reader has not come yet, in order
    for step in steps:
        if not isinstance(step, fx.Node):
            waiting.clear()
            continue
        if step.op == "get_attr":
            chosen.add(step)
            continue
        operands = [] if step in apart else [n for n in _operands(step) if n in waiting]
        size = 1 + sum(ops[n] for n in operands)
        fits = len(operands) == 0 or (waiting[-len(operands) :] == operands and size <= MAX_OPS)
        if fits:
            del waiting[len(waiting) - len(operands) :]
            chosen.update(operands)
        ops[step] = size if fits else 1
        if not fits or not _is_candidate(step, readers):
            waiting.clear()  # this step is a statement: those before it must be too
        if _is_candidate(step, readers):
            waiting.append(step)
    return chosen


def _operands(node: fx.Node) -> list[fx.Node]:
    """Operands in the order in which the printed text names them; none where text depends on the mode."""
    if "eval_args" in node.meta:
        same: list[fx.Node] = []
        fx.node.map_arg((node.meta["eval_args"], node.meta["eval_kwargs"]), same.append)
        trained: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), trained.append)
        if same != trained:
            return []
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    if node.target is operator.setitem:  # `x[i] = v` evaluates v first
        found = []
        fx.node.map_arg((node.args[2], node.args[0], node.args[1]), found.append)
    return found


def _is_candidate(node: fx.Node, readers: dict[fx.Node, list[Any]]) -> bool:
    uses = readers.get(node, [])
    if len(uses) != 1 or not isinstance(uses[0], fx.Node) or node.meta.get("mutates") or node.meta.get("random"):
        return False
    reader = uses[0]
    if reader.target in IN_PLACE or not _reads_once(node, reader) or mode_of(node) != mode_of(reader):
        return False
    if is_in_place_method(reader) and reader.args[0] is node:
        return False
    if not (_is_in_line(node) and _is_in_line(reader)):
        return False
    if not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list, dict, type(None))):
        return True  # a size or another plain number
    return bool(node.meta.get("source")) and node.meta["source"] == reader.meta.get("source")


def _is_in_line(node: fx.Node) -> bool:
    """Whether the user's line itself calls the module, rather than a container that the line calls."""
    if node.op != "call_module":
        return True
    return re.search(rf"\b{str(node.target).rpartition('.')[2]}\b", code_of(node)) is not None


def _reads_once(node: fx.Node, reader: fx.Node) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg((reader.args, reader.kwargs), found.append)
    return found.count(node) == 1 and node in reads(reader)


def is_in_place_method(node: fx.Node) -> bool:
    """Whether a node calls a method such as `x.add_(y)`, which changes and returns its receiver."""
    if node.op != "call_method" or not isinstance(node.args[0], fx.Node):
        return False
    name = str(node.target)
    return name.endswith("_") and not name.endswith("__") and node.args[0] in node.meta.get("mutates", (node.args[0],))
