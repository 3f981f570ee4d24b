"""Edges between the nodes of a model's graph that fx does not know of: references to nodes in a node's meta.

`graph/opgraph.py` says what each key means. Readers are here; `graph/edit.py` alone writes these keys.
"""

from __future__ import annotations

from torch import fx

META_EDGES = ("mutates", "alias_of", "eval_args", "eval_kwargs")


def storage_root(node: fx.Node) -> fx.Node:
    """The owner of a node's storage: the first node of its chain of views and in-place results."""
    while node.meta.get("alias_of") is not None:
        node = node.meta["alias_of"]
    return node


def written_roots(node: fx.Node) -> list[fx.Node]:
    """The owners of the storages into which a node writes."""
    return [storage_root(target) for target in node.meta.get("mutates", ())]


def reads(node: fx.Node) -> list[fx.Node]:
    """The nodes that a node reads, in training or in evaluation."""
    if "eval_args" not in node.meta:
        return node.all_input_nodes
    found = dict.fromkeys(node.all_input_nodes)
    fx.map_arg((node.meta["eval_args"], node.meta["eval_kwargs"]), found.setdefault)
    return list(found)


def edges(node: fx.Node) -> list[fx.Node]:
    """All nodes to which a node has an edge: those that it reads, writes or shares storage with."""
    base = node.meta.get("alias_of")
    return [*reads(node), *node.meta.get("mutates", ()), *([] if base is None else [base])]
