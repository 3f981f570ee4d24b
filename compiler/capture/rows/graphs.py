"""The graphs of one trace with its tape: that of the traced rows, and those of other rows.

In: the recorder's graph, whose arguments hold `SizeSlot`s. Out: copies with plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ....graph.edit import Arguments, copy_edges, describe, evaluation_of, set_base, set_evaluation
from ....ir.plain_graph import PlainGraph
from ..replay import same
from .replay import RowReplay
from .sizes import OtherTrace, RowTape, plain


class TracedRows:
    """`items`: the nodes that unpack the values of a node, with their keys, also those that were removed since."""

    def __init__(self, graph: fx.Graph, tape: RowTape, items: dict[fx.Node, list[tuple[fx.Node, Any]]]):
        self.graph, self.tape, self.items = graph, tape, items

    def graph_for(self, inputs: Mapping[str, torch.Tensor] | None = None) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
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
            return fx.map_arg(plain(nest) if replay is None else replay.resolve(nest), copies.__getitem__)

        for node in self.graph.nodes:
            copy = copies[node] = made.create_node(
                node.op, node.target, arguments(node.args), arguments(node.kwargs), node.name, node.type
            )
            if node.op != "output":
                describe(copy, node.meta, node.meta["val"] if replay is None else replay.value(node))
        for node, copy in copies.items():
            copy_edges(node, copy, copies.__getitem__)
            if replay is not None and node in replay.alias:
                owner = replay.alias[node]
                if owner is not None and owner not in copies:
                    raise OtherTrace(f"{node.meta['source']}\n  {node.target} shares memory with what is not used else")
                set_base(copy, None if owner is None else copies[owner])
            evaluation = evaluation_of(node)
            if evaluation is not None:
                own = arguments(evaluation[0]), arguments(evaluation[1])
                set_evaluation(copy, None if self._is_as_in_training(node, copy, own) else own)
        return made, copies

    def _is_as_in_training(self, node: fx.Node, copy: fx.Node, evaluation: Arguments) -> bool:
        """Arguments of evaluation may be made of other sizes, and yet be the same numbers."""
        is_same = same(evaluation, (copy.args, copy.kwargs))
        was_same = same(plain(evaluation_of(node)), plain((node.args, node.kwargs)))
        if is_same != was_same:
            raise OtherTrace(f"{node.meta['source']}\n  evaluation differs from training for some rows only")
        return is_same
