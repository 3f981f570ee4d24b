"""The statements of a function body: which steps have one of their own, and how long each value is read.

In: steps (ops, calls of blocks, loops) in order and the wanted outputs. Out: `Statements`, before anything has a name.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from ..ir.regions import Region
from .expressions import IN_PLACE
from .inlining import is_in_place_method, nodes_to_inline
from .loops import Loop
from .names import FOREVER
from .segments import BlockCall, item_reads

Statement = fx.Node | BlockCall | Loop | Region
_MAX_UNPACKED = 16


class Statements:
    """`order`: the steps with a statement. `inlined`: nodes printed inside their reader. `unpacked`: per tuple-valued
    node and position, the nodes that take this item. `same_object`: per result of an in-place op, what it changed."""

    def __init__(self, steps: Sequence[Statement], outputs: Sequence[fx.Node], apart: set[Any]):
        self.readers: dict[fx.Node, list[Any]] = {}
        for step in steps:
            for read in step_reads(step):
                self.readers.setdefault(read, []).append(step)
        for node in outputs:
            self.readers.setdefault(node, []).append("output")
        self.unpacked = {n: items for n in steps if isinstance(n, fx.Node) and (items := self._items(n))}
        items_of = {item for rows in self.unpacked.values() for row in rows for item in row}
        self.inlined = nodes_to_inline([s for s in steps if s not in items_of], self.readers, apart)
        self.order = [s for s in steps if s not in items_of and s not in self.inlined]
        self.same_object = self._results_in_place()
        self._last_use: dict[fx.Node, int] = {}
        for i, step in enumerate(self.order):
            for read in self._reads_through(step):
                self._last_use[self._root(read)] = i
        for node in outputs:
            for read in self._reads_through(node) if node in self.inlined else [node]:
                self._last_use[self._root(read)] = FOREVER

    def last_use(self, node: fx.Node, default: int) -> int:
        """The place of the last statement that reads a value, or `default` where none does."""
        return self._last_use.get(self._root(node), default)

    def follows(self, place: int) -> Statement | None:
        """The step after the statement at `place`."""
        return self.order[place + 1] if place + 1 < len(self.order) else None

    def _items(self, node: fx.Node) -> list[list[fx.Node]]:
        value, users = node.meta.get("val"), self.readers.get(node, [])
        if not isinstance(value, (tuple, list)) or not 1 <= len(value) <= _MAX_UNPACKED or not users:
            return []
        rows: list[list[fx.Node]] = [[] for _ in value]
        for user in users:
            is_item = isinstance(user, fx.Node) and user.target is operator.getitem and isinstance(user.args[1], int)
            if not is_item or user.args[0] is not node:
                return []
            rows[user.args[1]].append(user)
        return rows if sum(map(bool, rows)) > 1 or len(value) == 1 else []

    def _results_in_place(self) -> dict[fx.Node, fx.Node]:
        found = {}
        for step in self.order:
            if isinstance(step, fx.Node) and (is_in_place_method(step) or step.target in IN_PLACE):
                receiver = step.args[0]
                if isinstance(receiver, fx.Node) and (receiver not in self.inlined or receiver.op == "get_attr"):
                    found[step] = receiver
        return found

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self.same_object:
            node = self.same_object[node]
        return node

    def _reads_through(self, step: Statement) -> list[fx.Node]:
        """Named values that a statement reads, also through what is printed inside of it."""
        found: list[fx.Node] = []
        for read in step_reads(step):
            found += self._reads_through(read) if read in self.inlined else [read]
        return found


def step_reads(step: Statement) -> list[fx.Node]:
    """Values that a step reads, in training or in evaluation mode."""
    if isinstance(step, Region):
        return step.inputs
    return step.reads() if isinstance(step, Loop) else item_reads(step)
