"""`add-twice`: a product with 2 becomes a sum, whose result is the same bit by bit.

In: the op graph. Out: a copy in which `x * 2.0` is `x + x`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from penstock.graph.edit import copy_graph
from penstock.graph.opgraph import OpGraph
from penstock.ir.program import Program
from penstock.passes.base import Explanation, Pass, PlanSoFar
from penstock.passes.decisions import Decision
from penstock.passes.draft import Draft
from penstock.passes.rewrite.graph_pass import GraphPass


@dataclass(frozen=True)
class AddTwice(GraphPass):
    """It has no options."""

    name: ClassVar[str] = "add-twice"
    decides: ClassVar[tuple[Decision, ...]] = (Decision("doubled", list[str], []),)  # nodes of the op graph

    @classmethod
    def explain(cls, decisions: Any, programs: Sequence[Program]) -> Explanation:
        doubled = decisions.doubled
        return Explanation([f"products with 2 that are sums: {', '.join(doubled)}"]) if doubled else Explanation()

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        return [cls() if best.find(cls) is None else None] if products(best.start.graph) else []

    def plan(self, draft: Draft) -> list[str]:
        return [node.name for node in products(draft.graph)]

    def rewrite(self, draft: Draft, decision: list[str]) -> None:
        graph = copy_graph(draft.graph)
        for node in products(graph):
            if node.name in decision:
                node.target, node.args = torch.add, (node.args[0], node.args[0])
        draft.graph = graph


def products(graph: OpGraph) -> list[fx.Node]:
    """The calls that multiply a tensor by 2."""
    return [node for node in graph.nodes if node.target is torch.mul and node.args[1] == 2.0]
