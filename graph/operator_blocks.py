"""Blocks of single operators: FTPipe's finer granularity of basic blocks (4, "Tracing execution").

In: the op graph's nodes. Out: groups of nodes that must not be cut apart, most of them one operator. An operator takes
along the views that only it reads; a view with several readers stays with its base, a parameter with all its readers. A
value that is written in place stays with all that reads it up to the last write. Groups that would depend on each other
in a cycle become one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import networkx as nx
from networkx.utils import UnionFind
from torch import fx

from ..ir.calls import function_name
from ..ir.edges import storage_root, written_roots
from .opgraph import OpGraph

Pair = tuple[fx.Node, fx.Node]


def operator_groups(graph: OpGraph, nodes: list[fx.Node], inseparable: Iterable[Pair]) -> list[list[fx.Node]]:
    """Groups of `nodes` in an order in which none reads a later one. `inseparable`: pairs that must stay together."""
    place = {node: i for i, node in enumerate(nodes)}
    groups: UnionFind = UnionFind(nodes)
    for a, b in (*inseparable, *_with_parameters(nodes), *_with_views(nodes), *_with_writes(nodes)):
        if a in place and b in place:
            groups.union(a, b)
    for knot in nx.strongly_connected_components(_quotient(groups, nodes)):
        groups.union(*knot)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(groups[node], []).append(node)
    order = nx.lexicographical_topological_sort(_quotient(groups, nodes), key=lambda root: place[members[root][-1]])
    return [members[root] for root in order]


def main_node(graph: OpGraph, nodes: list[fx.Node]) -> fx.Node:
    """The node that a group is named after: a module with parameters, else the last that computes something."""
    for node in nodes:
        if node.op == "call_module" and graph.node_parameters(node):
            return node
    return next((n for n in reversed(nodes) if n.op != "get_attr" and n.meta.get("alias_of") is None), nodes[-1])


def operator_name(node: fx.Node) -> str:
    """A dotted name: the module's own path, or the path of the module that called the function and the function."""
    path = str(node.meta.get("module_path", ""))
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    function = function_name(node.target, node.name)
    return f"{path}.{function}" if path else function


def _with_parameters(nodes: list[fx.Node]) -> Iterator[Pair]:
    """Pairs of a parameter and its readers: a weight is not a value to send."""
    for node in nodes:
        if node.op == "get_attr":
            yield from ((node, user) for user in node.users)


def _with_views(nodes: list[fx.Node]) -> Iterator[Pair]:
    """Pairs of a view and its only reader, or its base: what crosses a border is a base, which others may read."""
    for node in nodes:
        base = node.meta.get("alias_of")
        if base is not None and not node.meta.get("mutates"):
            yield node, next(iter(node.users)) if len(node.users) == 1 else base


def _with_writes(nodes: list[fx.Node]) -> Iterator[Pair]:
    """Pairs of a storage's last write with what reads the storage before, which would read another value elsewhere."""
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(nodes):
        last.update((root, i) for root in written_roots(node))
    for i, node in enumerate(nodes):
        for value in (node, *node.all_input_nodes):
            root = storage_root(value)
            if i <= last.get(root, -1):
                yield root, node
                yield nodes[last[root]], node


def _quotient(groups: UnionFind, nodes: list[fx.Node]) -> nx.DiGraph:
    found = nx.DiGraph()
    inside = set(nodes)
    for node in nodes:
        found.add_node(groups[node])
        for arg in node.all_input_nodes:
            if arg in inside and groups[arg] is not groups[node]:
                found.add_edge(groups[arg], groups[node])
    return found
