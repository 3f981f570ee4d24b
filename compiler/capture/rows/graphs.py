"""The graphs of one trace with its tape: that of the traced rows, and those of other rows.

In: the recorder's graph, whose arguments hold `SizeSlot`s. Out: copies with plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ....ir.plain_graph import PlainGraph
from ..replay import same
from .replay import RowReplay
from .sizes import OtherTrace, RowTape, plain


class TracedRows:
    """`items`: the nodes that unpack the values of a node, with their keys, also those that were removed since."""

    def __init__(self, graph: fx.Graph, tape: RowTape, items: dict[fx.Node, list[tuple[fx.Node, Any]]]):
        self.graph, self.tape, self.items = graph, tape, items

    def at(self, inputs: Mapping[str, torch.Tensor] | None = None) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        """The graph for these inputs, by default those of the trace, and its nodes by those of the trace.

        Raises `OtherTrace` where the model does something else for these.
        """
        if inputs is None:
            return self._copy(None)
        placeholders = {node: inputs[str(node.target)] for node in self.graph.nodes if node.op == "placeholder"}
        replay = RowReplay(dict(placeholders), self.items)
        replay.run(self.tape)
        return self._copy(replay)

    def _copy(self, replay: RowReplay | None) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
        made, copies = PlainGraph(), dict[fx.Node, fx.Node]()

        def arguments(nest: Any) -> Any:
            return fx.map_arg(plain(nest) if replay is None else replay.at(nest), copies.__getitem__)

        for node in self.graph.nodes:
            copy = copies[node] = made.create_node(
                node.op, node.target, arguments(node.args), arguments(node.kwargs), node.name, node.type
            )
            copy.meta = dict(node.meta)
            if replay is not None and "val" in copy.meta:
                copy.meta["val"] = replay.value(node)
        for node, copy in copies.items():
            if replay is not None and node in replay.alias:
                copy.meta["alias_of"] = owner = replay.alias[node]
                if owner is not None and owner not in copies:
                    raise OtherTrace(f"{node.meta['source']}\n  {node.target} shares memory with what is not used else")
            for key in ("mutates", "alias_of", "eval_args", "eval_kwargs"):
                if key in copy.meta:
                    copy.meta[key] = arguments(copy.meta[key])
            if "eval_args" in copy.meta:
                self._settle_evaluation(node, copy)
        return made, copies

    def _settle_evaluation(self, node: fx.Node, copy: fx.Node) -> None:
        """Arguments of evaluation may be made of other sizes, and yet be the same numbers."""
        is_same = same(copy.meta["eval_args"], copy.args) and same(copy.meta["eval_kwargs"], copy.kwargs)
        traced = [plain(nest) for nest in (node.meta["eval_args"], node.meta["eval_kwargs"], node.args, node.kwargs)]
        was_same = same(traced[:2], traced[2:])
        if is_same != was_same:
            raise OtherTrace(f"{node.meta['source']}\n  evaluation differs from training for some rows only")
        if is_same:
            del copy.meta["eval_args"], copy.meta["eval_kwargs"]
