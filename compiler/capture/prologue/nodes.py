"""The calls of a trace that are a prologue: what forward makes of the values of a batch before anything is computed.

A line reads a value (`grid.tolist()`), and what its function makes from then on follows from the number that it got:
other batches give other numbers, and so none of these calls can be in a program. In: the calls and reads of a trace.
Out: the calls of the prologue, and the tensors that it hands to the program.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx

from ....graph.dataflow import closure
from ....graph.edit import GraphEdit, erase, erase_dead, replace_uses
from ....graph.opgraph import OpGraph, build_module, value_tensors
from ....ir.calls import call_name, function_name
from ....ir.errors import CaptureError
from ..lines import SourceLines
from ..values.known import KnownValues, reads_form
from .made_input import MadeInput


class PrologueNodes:
    """Collects the nodes of a prologue while forward runs."""

    def __init__(self, values: KnownValues, lines: SourceLines):
        self.values, self.lines = values, lines
        self.calls: set[fx.Node] = set()  # those that follow from a value that was read
        self.made: set[fx.Node] = set()  # nodes whose value is made by such a call: itself, or what it writes
        self.ids: set[int] = set()  # of the tensors that the prologue of another batch has made
        self._readers: list[FrameType] = []  # the functions that have read a value, and those that called them
        self._has_own_size = False  # the call that is recorded has a size by a value

    def note_read(self, is_tensor: bool) -> None:
        """A line has read a value that follows from the batch. `is_tensor`: it gets a tensor, of a size by that value.
        A module's `forward` does much that has nothing to do with such a value, and does not count as a reader: numbers
        of its calls that follow from one are those of the program, as all numbers are."""
        self._has_own_size |= is_tensor
        for frame in [] if is_tensor else self.lines.frames(2):
            if frame.f_code.co_name != "forward" and frame not in self._readers:
                self._readers.append(frame)

    @property
    def is_begun(self) -> bool:
        """Whether the call that is recorded may follow from a value that was read."""
        return self._has_own_size or self.is_reading

    @property
    def is_reading(self) -> bool:
        """Whether a function that runs has read a value."""
        return bool(self._readers) and any(frame in self._readers for frame in self.lines.frames())

    def add(self, node: fx.Node) -> frozenset[str]:
        """Take a call that has been recorded, if it follows from a value that was read and its own is known. Returns
        the inputs that are to be lent, too, for a call of which only these are missing."""
        written = node.meta["mutates"]
        values = [t for each in (written or [node]) for t in value_tensors(each.meta["val"])]
        follows = self.is_begun or any(map(self.is_made, node.all_input_nodes))
        self._has_own_size = False
        if not follows or not values:
            return frozenset()
        if not all(map(self.values.knows, values)):
            return self._sources(node)
        self.calls.add(node)
        self.made.update([node, *written])
        return frozenset()

    def is_made(self, node: fx.Node) -> bool:
        while node.target is operator.getitem and node not in self.made:
            whole = node.args[0]
            if not isinstance(whole, fx.Node) or isinstance(whole.meta["val"], Tensor):  # a call of the model's own
                return False
            node = whole
        return node in self.made

    def has(self, node: fx.Node) -> bool:
        """Whether a node is of the prologue."""
        return node in self.calls or self.is_made(node)

    def outputs(self, graph: fx.Graph, dead: Collection[fx.Node] = ()) -> list[fx.Node]:
        """The nodes of the prologue that other nodes read, less the dead ones, in the order in which they do."""
        readers = [node for node in graph.nodes if not self.has(node) and node not in dead]
        return [*dict.fromkeys(arg for node in readers for arg in node.all_input_nodes if self.is_made(arg))]

    def number_of_places(self, node: fx.Node) -> int:
        """The size of the dimensions that all calls of the program index with a node; 0 where one does anything else
        with it."""
        sizes = {_indexed_size(user, node) for user in node.users if not self.has(user)}
        return sizes.pop() if len(sizes) == 1 else 0

    def inputs_of(self, operands: Any) -> frozenset[str]:
        """The inputs that tell the values of a call's operands: of those that follow from the batch alone."""
        return frozenset().union(*map(self._sources, self._unknown(operands)))

    def tensors_of(self, operands: Any) -> frozenset[str]:
        """The names of the model's tensors of which a call's operands are made."""
        above = closure(self._unknown(operands), _tellers)
        return frozenset(str(each.target) for each in above if each.op == "get_attr")

    def _unknown(self, operands: Any) -> list[fx.Node]:
        nodes: list[fx.Node] = []
        fx.map_arg(operands, nodes.append)
        return [n for n in nodes if not all(map(self.values.knows, value_tensors(n.meta["val"])))]

    def _sources(self, node: fx.Node) -> frozenset[str]:
        """The inputs from which alone a value follows; none where it follows from anything else."""
        above = closure([node], _tellers)
        for each in above:
            is_known = each.op == "get_attr" and self.values.knows(each.meta["val"])
            if each.meta["random"] or (each.op in ("get_attr", "call_module") and not is_known):
                return frozenset()
        return frozenset(str(each.target) for each in above if each.op == "placeholder")


def _tellers(node: fx.Node) -> list[fx.Node]:
    """The nodes that tell a node's value: its operands, and the calls that write to it."""
    writers = [user for user in node.users if node in user.meta.get("mutates", ())]
    return [*node.all_input_nodes[reads_form(call_name(node)) :], *writers]


def find_rows(
    name: str, node: fx.Node, whole: Tensor, parts: Sequence[Tensor], places: tuple[int, int]
) -> MadeInput:
    """The input in place of an output of a prologue, which is this in a whole batch and in its parts. `places`: what
    `number_of_places` finds in the first part and in the whole batch. Raises `CaptureError` where the parts do not
    come to the whole."""
    found = [MadeInput(name, dim) for dim in range(whole.dim()) if whole.numel()] + [MadeInput(name, None, whole)]
    if places[0] and places[0] * len(parts) == places[1]:  # no table, which has the same number for each part
        found.append(MadeInput(name, places=places[1]))
    for each in found:
        if each.is_made_of(whole, parts, len(parts)):
            return each
    raise CaptureError(
        f"{node.meta['source']}\n  rows of a batch meet in what forward makes here of values that it reads, so that "
        "micro-batches would get other numbers than the whole batch"
    )


def _indexed_size(reader: fx.Node, node: fx.Node) -> int:
    name = function_name(reader.target)
    if name == "index_select" and isinstance(reader.args[0], fx.Node) and reader.args[2:] == (node,):
        size = reader.args[0].meta["val"].shape[reader.args[1]]
        return size if isinstance(size, int) else 0
    if name not in ("getitem", "setitem") or not isinstance(reader.args[0], fx.Node):
        return 0
    key = reader.args[1] if isinstance(reader.args[1], tuple) else (reader.args[1],)
    before = key[: key.index(node)] if node in key else (Ellipsis,)
    if not all(isinstance(item, (slice, int)) for item in before):
        return 0
    size = reader.args[0].meta["val"].shape[len(before)]
    return size if isinstance(size, int) else 0


def require_number(prologue: Sequence[fx.Node], number: int) -> None:
    """Raise `CaptureError` for another number of outputs of a prologue."""
    if len(prologue) != number:
        raise CaptureError(
            f"forward makes {len(prologue)} tensors by values that it reads from micro-batches of this size, and "
            f"{number} from the whole batch"
        )


def read_made_inputs(graph: OpGraph, nodes: PrologueNodes, made: Sequence[MadeInput]) -> None:
    """Let the program read inputs and constants in place of what a prologue makes, of which it then has nothing."""
    prologue = nodes.outputs(graph.graph)
    require_number(prologue, len(made))
    graph.places = frozenset(each.name for each in made if each.places != 0)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    inputs = {node.target: node for node in graph.nodes if node.op == "placeholder"}
    new: dict[fx.Node, fx.Node] = {}
    for node, each in zip(prologue, made):
        edit = GraphEdit(graph, first, like=node)
        if each.value is not None:
            graph.constants[each.name] = each.value
            new[node] = edit.put("get_attr", each.name, (), node.meta["val"])
        else:
            new[node] = edit.call(torch.movedim, inputs[each.name], 0, each.dim) if each.dim else inputs[each.name]
        if new[node].meta["val"].shape != node.meta["val"].shape:
            raise CaptureError(
                f"{node.meta['source']}\n  makes {list(node.meta['val'].shape)} by values that forward reads from "
                f"micro-batches of this size, not {list(new[node].meta['val'].shape)}: choose another number of "
                "micro_batches"
            )
    gone = [node for node in graph.nodes if nodes.has(node)]
    replace_uses(graph, new, readers={node for node in graph.nodes if not nodes.has(node)})
    erase(graph, gone)
    erase_dead(graph)
    graph.module = build_module(graph.model, graph.graph, graph.unregistered_tensors)
