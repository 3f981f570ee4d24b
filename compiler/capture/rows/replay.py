"""The calls of a tape once more, at other sizes.

In: a `RowTape`, and the inputs of another batch. Out: the value of each node. Where the model would do something else,
`OtherTrace` says at which line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ....graph.opgraph import value_tensors
from .sizes import Asked, Call, CallOutcome, Computed, ModeSwitch, NumberSlot, OtherTrace, RowTape, SizeSlot, looks_of


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
            elif isinstance(entry, ModeSwitch):
                entry.switch()
            elif isinstance(entry, Asked):
                answer = entry.query(self.value(entry.node), *entry.args, **dict(entry.kwargs))
                self.answers[entry] = answer if entry.place is None else answer[entry.place]
            elif isinstance(entry, CallOutcome):
                args, kwargs = self.arguments(entry)
                if not _same(entry.run(*args, **kwargs), entry.value):
                    raise OtherTrace(f"{entry.line}\n  this line gives something else for other rows")
            elif not _same(self.value_of(entry.number), entry.value):
                raise OtherTrace(
                    f"{entry.line}\n  the model does something else for other rows: a number is {entry.value!r} here "
                    f"and {self.value_of(entry.number)!r} there"
                )

    def value_of(self, number: Any) -> Any:
        if isinstance(number, Computed):
            if number not in self.answers:
                self.answers[number] = number.function(*map(self.value_of, number.operands))
            return self.answers[number]
        return self.answers[number] if isinstance(number, Asked) else number

    def resolve(self, nest: Any) -> Any:
        """Arguments with the numbers of these sizes."""
        return fx.node.map_aggregate(
            nest, lambda leaf: self.value_of(leaf.number) if isinstance(leaf, (SizeSlot, NumberSlot)) else leaf
        )

    def call(self, entry: Call) -> None:
        node, before = entry.node, entry.node.meta["val"]
        args, kwargs = self.arguments(entry)
        given = list(value_tensors((args, kwargs)))
        found = entry.run(*args, **kwargs)
        if isinstance(found, torch.Tensor) and not node.meta["mutates"] and any(found is value for value in given):
            found = found.view_as(found)
        if looks_of(found) != entry.looks:
            raise OtherTrace(f"{node.meta['source']}\n  {node.target} gives other values for other rows")
        was = list(value_tensors(fx.map_arg((entry.args, entry.kwargs), lambda n: n.meta["val"])))
        if _shares([*given, *value_tensors(found)]) != _shares([*was, *value_tensors(before)]):
            if not isinstance(found, torch.Tensor) or _shares(given) != _shares(was):
                raise OtherTrace(f"{node.meta['source']}\n  {node.target} shares other memory for other rows")
            self.alias[node] = self.owner(entry, found)  # contiguous() of one row is no copy
        self.bind(node, found)

    def owner(self, entry: Call, found: torch.Tensor) -> fx.Node | None:
        """The first argument whose memory a result shares."""
        nodes: list[fx.Node] = []
        fx.map_arg((entry.args, entry.kwargs), nodes.append)
        alike = (n for n in nodes if any(len(set(_shares([found, t]))) == 1 for t in value_tensors(self.value(n))))
        return next(alike, None)

    def arguments(self, entry: Call | CallOutcome) -> Any:
        return fx.map_arg((self.resolve(entry.args), self.resolve(entry.kwargs)), self.value)

    def value(self, node: fx.Node) -> Any:
        return self.values.get(node, node.meta["val"])

    def bind(self, node: fx.Node, found: Any) -> None:
        self.values[node] = found
        for child, key in self.items.get(node, ()):
            self.bind(child, found[key])


def _same(a: Any, b: Any) -> bool:
    """Whether two outcomes are the same; those with tensors have no values to compare."""
    return type(a) is type(b) and not [*value_tensors(a)] and a == b


def _shares(tensors: list[torch.Tensor]) -> list[int]:
    storages = [int(t.untyped_storage()._cdata) for t in tensors]
    return [storages.index(storage) for storage in storages]
