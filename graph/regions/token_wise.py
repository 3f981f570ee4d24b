"""The token-wise parts of an op graph: runs of token-wise nodes of one layer that can be computed tile by tile.

In: an op graph. Out: `TokenPart`s. A part is as large as it can be: it ends where tokens mix (attention), where a value
is drawn or written in place, and where its layer ends, and gives no value in another form than it has inside, such as
keys that are repeated for each head. Each node was run on a tile of fake tensors: it gives the tile of its result.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...ir.edges import storage_root
from ...runtime.torch_names import FakeTensor, FakeTensorMode
from ..blocks import Block
from ..costs.block import FakeBlockRun
from ..dataflow import Dataflow
from ..divide.local import arguments_for_shape
from ..follow.tokens import TokenFacts, sequence_lengths, token_facts
from ..layers import layer_runs
from ..operators.calls import call_key, is_form, names_sizes
from ..opgraph import OpGraph, is_check, is_mode_switch, value_tensors

SIZE = 3  # of the tile on which nodes are tried: no size of its own broadcasts


@dataclass
class TokenPart:
    """`nodes` in order; `moved`: those of them whose arguments name the number of tokens, with others that do not.
    `inside_bytes`: of the values that no other node reads, `edge_bytes`: of what the part reads and gives."""

    name: str
    nodes: list[fx.Node]
    facts: TokenFacts
    args: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    inside_bytes: int = 0
    edge_bytes: int = 0

    @property
    def length(self) -> int:
        """The number of tokens of a sequence."""
        return self.facts.length


def token_parts(graph: OpGraph, device_kind: str = "cpu") -> list[TokenPart]:
    """The parts in order; none of a graph whose sizes differ from batch to batch, or into which no sequence enters.
    Where sequences of several lengths enter, those of the longest are cut."""
    if graph.sizes or graph.symbols:
        return []
    known = graph.looked.setdefault((token_parts, graph.module), {})  # a rewrite asks again for what its plan has found
    if (graph.team, device_kind) not in known:
        whole = max(sequence_lengths(graph), default=0)
        lengths = dict.fromkeys((whole // graph.team, whole))  # members of a team may have a part of the tokens each
        found = (_parts(graph, n, device_kind) for n in lengths if n > SIZE)
        known[graph.team, device_kind] = next(filter(None, found), [])
    parts: list[TokenPart] = known[graph.team, device_kind]
    return parts


def _parts(graph: OpGraph, length: int, device_kind: str) -> list[TokenPart]:
    """The parts of sequences of this length."""
    facts = token_facts(graph, length, device_kind)
    modes = (t.fake_mode for n in graph.nodes for t in value_tensors(n.meta.get("val")) if isinstance(t, FakeTensor))
    mode = next(modes)
    made: dict[Hashable, Any] = {}  # of calls that are alike, in any layer
    with mode, torch.no_grad():
        return [part for name, run in layer_runs(graph) for part in _Finder(graph, facts, name, mode, made).parts(run)]


class _Finder:
    """Finds the parts of one layer."""

    def __init__(self, graph: OpGraph, facts: TokenFacts, layer: str, mode: FakeTensorMode, made: dict[Hashable, Any]):
        self.graph, self.facts, self.layer, self.made = graph, facts, layer, made
        self.runner = FakeBlockRun(graph, Block(layer, ()), mode, "cpu")
        self.found: list[TokenPart] = []
        self.written = Dataflow(graph.nodes).written_by.keys()
        self.open: dict[fx.Node, Any] = {}  # node of the part -> its value on a tile
        self.args: dict[fx.Node, tuple[Any, ...]] = {}
        self.after: set[fx.Node] = set()  # what depends on the part and is not in it

    def parts(self, nodes: Sequence[fx.Node]) -> list[TokenPart]:
        for node in nodes:
            if _is_barrier(node):
                self._close()
            elif node.op != "get_attr":
                self._look(node)
        self._close()
        return self.found

    def _look(self, node: fx.Node) -> None:
        operands = node.all_input_nodes
        if self._is_candidate(node):
            if not self.after.isdisjoint(operands):
                self._close()
            if self._joins(node):
                return
        if any(n in self.open or n in self.after for n in operands):
            self.after.add(node)

    def _is_candidate(self, node: fx.Node) -> bool:
        tensors = list(value_tensors(node.meta["val"]))
        if not self.facts.is_token_wise(node) or "eval_args" in node.meta or not node.users:
            return False
        if not isinstance(node.meta["val"], torch.Tensor | tuple | list) or not tensors:
            return False
        return any(t.requires_grad for t in tensors) and storage_root(node) not in self.written

    def _joins(self, node: fx.Node) -> bool:
        """Take a node into the part, if it gives a tile of its result for a tile of what it reads."""
        root = storage_root(node)
        if root is not node and root not in self.open:
            return False  # a view of what enters the part costs nothing where it is
        values: dict[fx.Node, Any] = {}
        for operand in node.all_input_nodes:
            if operand in self.open:
                values[operand] = self.open[operand]
            elif (value := self._entering(operand)) is None:
                return False
            else:
                values[operand] = value
        places = self.facts.places[node]
        wanted = [self._tile_shape(t, p.dim) for t, p in zip(value_tensors(node.meta["val"]), places) if p is not None]
        for args in self._args(node):
            made = self._run_on_tiles(node, *fx.map_arg((args, node.kwargs), values.__getitem__))
            if made is not None and [tuple(t.shape) for t in value_tensors(made)] == wanted:
                self.open[node] = made
                if args is not node.args:
                    self.args[node] = args
                return True
        return False

    def _run_on_tiles(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """The result of a call on tiles; None where it needs all tokens."""
        key = call_key(self.graph, node, args, kwargs, lambda t: (tuple(t.shape), t.stride(), t.dtype))
        if key is None or key not in self.made:
            try:
                made = self.runner.call(node, args, kwargs)
            except Exception:  # a call that needs all tokens
                made = None
            if key is None:
                return made
            self.made[key] = made
        return self.made[key]

    def _entering(self, operand: fx.Node) -> Any:
        """A tile of what enters the part; None where it cannot be cut."""
        value = operand.meta["val"]
        if operand.op == "get_attr":
            return self.runner.call(operand, (), {})
        if not isinstance(value, torch.Tensor):
            return None
        place = self.facts.place(operand)
        if place is None:
            return value
        plain = place.inner == 1 and place.is_plain(value.shape, self.facts.length)
        return value.narrow(place.dim, 0, SIZE) if plain else None

    def _tile_shape(self, tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
        shape = list(tensor.shape)
        shape[dim] = shape[dim] // self.facts.length * SIZE
        return tuple(shape)

    def _args(self, node: fx.Node) -> list[tuple[Any, ...]]:
        """The arguments that a call may have on a tile: without the number of tokens where it names a shape."""
        value, place = node.meta["val"], self.facts.place(node)
        if place is None or node.kwargs or not names_sizes(self.graph, node):
            return [node.args]
        shape = [-1 if dim == place.dim else size for dim, size in enumerate(value.shape)]
        return [args for args, _ in arguments_for_shape(node.args, {}, value.shape, shape, is_open=False)]

    # --- a part's end

    def _close(self) -> None:
        nodes = self._trim([*self.open])
        if len(nodes) > 1:
            args = {node: self.args[node] for node in nodes if node in self.args}
            part = TokenPart(f"{self.layer}/{len(self.found) + 1}", nodes, self.facts, args)
            part.inside_bytes, part.edge_bytes = _bytes(part)
            if part.inside_bytes:
                self.found.append(part)
        self.open, self.args, self.after = {}, {}, set()

    def _trim(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """The part without what it should not, or cannot, give."""
        while True:
            inside = set(nodes)
            ends = [node for node in nodes if any(user not in inside for user in node.users)]
            bad = {node for node in ends if not self._can_leave(node)}
            bad |= {node for node in ends if inside.isdisjoint(node.users) and self._is_better_outside(node, inside)}
            if not bad:
                return nodes
            for node in nodes:  # and what is made of it
                if not bad.isdisjoint(node.all_input_nodes):
                    bad.add(node)
            nodes = [node for node in nodes if node not in bad]

    def _can_leave(self, node: fx.Node) -> bool:
        """Whether a value is a tensor with all of its memory, with tokens one after the other, and gets gradients."""
        value, place = node.meta["val"], self.facts.place(node)
        if not isinstance(value, torch.Tensor) or place is None or place.inner != 1 or not value.requires_grad:
            return False
        dense = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return dense and place.is_plain(value.shape, self.facts.length)

    def _is_better_outside(self, node: fx.Node, inside: Collection[fx.Node]) -> bool:
        """Whether a value that the part gives is only another form of what it could give instead."""
        root = storage_root(node)
        if root is not node:
            return self._can_leave(root)
        if not is_form(self.graph, node):
            return False
        sources = {storage_root(n) for n in node.all_input_nodes if n in inside}
        new = [n for n in sources if all(user in inside for user in n.users)]  # what it does not give anyway
        return _size(node) > sum(map(_size, new))


def _is_barrier(node: fx.Node) -> bool:
    """Whether nodes may not move across this one."""
    meta = node.meta
    changes = meta.get("random") or meta.get("mutates") or meta.get("updates_buffers")
    return bool(changes) or is_check(node) or is_mode_switch(node)


def _size(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in value_tensors(node.meta["val"]))


def _bytes(part: TokenPart) -> tuple[int, int]:
    inside = set(part.nodes)
    ends = {node for node in part.nodes if any(user not in inside for user in node.users)}
    entering = {storage_root(n) for node in part.nodes for n in node.all_input_nodes} - inside
    own = (n for n in part.nodes if n not in ends and storage_root(n) is n)
    edge = (n for n in (*ends, *entering) if n.op != "get_attr")
    return sum(map(_size, own)), sum(map(_size, edge))
