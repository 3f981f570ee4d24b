"""Data flow in an op graph, through operands and through memory: what a value is made of, what is made of it, and what
nothing reads.

Memory counts: a value is also made of what is written in place into its storage, by any view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property

from torch import fx

from ..ir.edges import storage_root, written_roots
from .opgraph import OpGraph, is_check, is_mode_switch

Operands = Callable[[fx.Node], Iterable[fx.Node]]


def closure(nodes: Iterable[fx.Node], step: Operands) -> set[fx.Node]:
    """These nodes and all to which steps lead from any of them."""
    seen, waiting = set[fx.Node](), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += step(node)
    return seen


def has_effect(node: fx.Node, draws: bool = True, writes: bool = False) -> bool:
    """Whether a node matters though nothing may read it: an input or a result, a switch of modes, a check, a draw from
    the random generator (with `draws`), a write into an input, a parameter or a buffer (with `writes`: any write)."""
    if node.op in ("placeholder", "output") or is_mode_switch(node) or is_check(node):
        return True
    if node.meta.get("updates_buffers") or (draws and node.meta.get("random")):
        return True
    return any(writes or root.op in ("placeholder", "get_attr") for root in written_roots(node))


class Dataflow:
    """The data flow among some nodes, which are in order and not edited any more."""

    def __init__(self, nodes: Iterable[fx.Node]):
        self.nodes = list(nodes)
        self.written_by: dict[fx.Node, list[fx.Node]] = {}  # the owner of a storage -> what writes into it, in order
        for node in self.nodes:
            for root in written_roots(node):
                self.written_by.setdefault(root, []).append(node)

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        """The place of each node."""
        return {node: i for i, node in enumerate(self.nodes)}

    def sort_nodes(self, nodes: Collection[fx.Node]) -> list[fx.Node]:
        """Some of the nodes, in order."""
        return [node for node in self.nodes if node in nodes]

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that write into a node's storage."""
        return self.written_by.get(storage_root(node), [])

    def ancestors(
        self, nodes: Iterable[fx.Node], operands: Operands | None = None, ends: Collection[fx.Node] = ()
    ) -> set[fx.Node]:
        """These nodes and all that they are made of: what they read, and what writes into the storage of any of these.

        `operands`: which of its operands to go on to from a node; `ends`: nodes to stop at."""

        def step(node: fx.Node) -> Iterable[fx.Node]:
            if node in ends:
                return ()
            return (*(node.all_input_nodes if operands is None else operands(node)), *self.writers(node))

        return closure(nodes, step)

    def descendants(self, nodes: Iterable[fx.Node], operands: Operands | None = None) -> set[fx.Node]:
        """These nodes and all that is made of them: what reads one of these, and what later reads a storage into which
        one of these is written.

        `operands`: on which of its operands a node depends."""
        seen, changed = set(nodes), set[fx.Node]()  # `changed`: the owners of storages that were written
        for node in self.nodes:
            read = node.all_input_nodes if operands is None else operands(node)
            if node in seen or any(arg in seen or storage_root(arg) in changed for arg in read):
                seen.add(node)
                changed.update(written_roots(node))
        return seen.union(node for node in self.nodes if storage_root(node) in changed)

    def dead(self, kept: Iterable[fx.Node] = (), draws: bool = True, writes: bool = False) -> set[fx.Node]:
        """The nodes that can go, because neither a result nor an effect needs them.

        `kept`: nodes that stay although nothing reads them; `draws`: whether random draws stay, too, since all later
        draws would change; `writes`: whether writes into values that nothing reads stay."""
        needed = self.ancestors([*(node for node in self.nodes if has_effect(node, draws, writes)), *kept])
        return set(self.nodes) - needed


def shared_nodes(graph: OpGraph) -> set[fx.Node]:
    """Nodes that depend only on the batch and constants: no parameter, no gradient, no randomness, no written buffer.

    A node that shares storage with something written by an unshared node is unshared too.
    """
    written = {name for node in graph.nodes for name in node.meta.get("updates_buffers", ())}
    parameters = graph.parameters()
    shared: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output" or is_mode_switch(node):
            continue
        if node.op == "placeholder":
            shared.add(node)
        elif node.op == "get_attr":
            if node.target not in parameters and node.target not in written:
                shared.add(node)
        elif all(arg in shared for arg in node.all_input_nodes) and not (
            node.meta.get("random") or node.meta.get("updates_buffers") or graph.node_parameters(node)
        ):
            shared.add(node)
    return _drop_overwritten_nodes(graph, shared)


def _drop_overwritten_nodes(graph: OpGraph, shared: set[fx.Node]) -> set[fx.Node]:
    """Drop shared nodes whose storage an unshared node writes, and what depends on them, until no such node is left."""
    while True:
        dirty = Dataflow(node for node in graph.nodes if node not in shared).written_by.keys()
        bad = {n for n in shared if n.op != "placeholder" and storage_root(n) in dirty}
        for node in graph.nodes:
            if node in shared and any(arg in bad for arg in node.all_input_nodes):
                bad.add(node)
        if not bad:
            return shared
        shared = shared - bad
