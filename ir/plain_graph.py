"""An fx graph whose nodes are made and copied in a fraction of the time."""

from __future__ import annotations

from typing import Any

from torch import fx


class PlainGraph(fx.Graph):
    """Makes nodes without torch's search of their arguments for symbolic sizes, which would only warn, and finds the
    name of a target once."""

    def __init__(self) -> None:
        super().__init__()
        self._target_names: dict[Any, str] = {}

    def create_node(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...] | None = None,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        type_expr: Any = None,
    ) -> fx.Node:
        if name is None:
            name = self._target_names.get(target) or self._target_names.setdefault(target, self._target_to_str(target))
        name = self._graph_namespace.create_name(name, None)
        return self._add(fx.Node(self, name, op, target, args or (), kwargs or {}, type_expr))

    def copy_plain(self) -> PlainGraph:
        """A graph of its own with the same nodes, which have the same names and, in `meta`, the same entries."""
        made = PlainGraph()
        copies: dict[fx.Node, fx.Node] = {}
        copied = copies.__getitem__
        for node in self.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copied)
            copy = copies[node] = made._add(fx.Node(made, node.name, node.op, node.target, args, kwargs, node.type))
            copy.meta.update(node.meta)
        given, own = self._graph_namespace, made._graph_namespace
        own._used_names.update(given._used_names, own._obj_to_name.values())
        own._base_count.update(given._base_count)
        return made

    def _add(self, node: fx.Node) -> fx.Node:
        self._graph_namespace.associate_name_with_obj(node.name, node)
        self._insert(node)
        self._find_nodes_lookup_table.insert(node)
        self._len += 1
        return node
