"""`coarsen`: op graph to blocks.

In: the op graph. Out: `draft.blocks`, runs of consecutive nodes, so no cycle can arise. A run follows one element of
the user's module lists ("transformer.h.3"); what lies between them is cut at modules that own parameters. Nodes without
parameters join the run before them, and a base stays with every node that writes it in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..runtime.errors import PassError
from .base import Draft, Pass
from .blocks import (
    Block,
    node_inputs,
    node_outputs,
    shared_nodes,
    storage_root,
    structural_hash,
)
from .costs import measure_blocks
from .opgraph import OpGraph, is_mode_switch


@dataclass(frozen=True)
class Coarsen(Pass):
    name: ClassVar[str] = "coarsen"
    gives: ClassVar[tuple[str, ...]] = ("blocks",)
    decides: ClassVar[str] = "blocks"

    def plan(self, draft: Draft) -> dict[str, int]:
        """Block name to its number of nodes, in order."""
        return {name: len(nodes) for name, nodes in _runs(draft.graph)}

    def rewrite(self, draft: Draft, decision: dict[str, int]) -> None:
        runs = _runs(draft.graph)
        if {name: len(nodes) for name, nodes in runs} != decision:
            found = next((n for n, _ in runs if n not in decision), next(iter(decision), ""))
            raise PassError(f"the plan's blocks are not those of this model; the first that differs is {found!r}")
        draft.blocks = measure_blocks(draft.graph, make_blocks(draft.graph, runs), draft.hardware.devices[0].kind)


def make_blocks(graph: OpGraph, runs: list[tuple[str, list[fx.Node]]]) -> list[Block]:
    """Blocks with hash, inputs, outputs and parameter bytes, still without costs."""
    blocks = []
    for name, run in runs:
        nodes = tuple(run)
        inputs = node_inputs(nodes)
        parameters = {id(p): p for n in nodes for p in graph.node_parameters(n).values()}
        blocks.append(
            Block(
                name,
                nodes,
                structural_hash(graph, name, nodes, inputs),
                tuple(inputs),
                tuple(node_outputs(nodes)),
                sum(p.numel() * p.element_size() for p in parameters.values()),
            )
        )
    return blocks


def _runs(graph: OpGraph) -> list[tuple[str, list[fx.Node]]]:
    shared = shared_nodes(graph)
    nodes = [
        n for n in graph.nodes if n.op not in ("placeholder", "output") and n not in shared and not is_mode_switch(n)
    ]
    runs: list[tuple[str, list[fx.Node]]] = []
    for node in nodes:
        key = _block_path(node.meta.get("module_path", ""))
        if runs and (key == runs[-1][0] or not (_in_list(key) or graph.node_parameters(node))):
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    runs = _join_leading(graph, _join_written(runs))
    return _unique(runs)


def _block_path(path: str) -> str:
    """The path up to its first list index; without one, the whole path."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return path


def _in_list(key: str) -> bool:
    return key.rpartition(".")[2].isdigit()


def _join_leading(graph: OpGraph, runs: list[tuple[str, list[fx.Node]]]) -> list[tuple[str, list[fx.Node]]]:
    """A first run without parameters joins the second, so that every block has weights where the model has any."""
    if len(runs) > 1 and not any(graph.node_parameters(n) for n in runs[0][1]):
        runs[1:2] = [(runs[1][0], runs[0][1] + runs[1][1])]
        return runs[1:]
    return runs


def _join_written(runs: list[tuple[str, list[fx.Node]]]) -> list[tuple[str, list[fx.Node]]]:
    """Join all runs between a base and the last node that writes it, so that no cut falls between them."""
    home = {node: i for i, (_, nodes) in enumerate(runs) for node in nodes}
    upto = list(range(len(runs)))
    for _, nodes in runs:
        for node in nodes:
            for target in node.meta.get("mutates", ()):
                first = home.get(storage_root(target))
                if first is not None:
                    upto[first] = max(upto[first], home[node])
    joined: list[tuple[str, list[fx.Node]]] = []
    end = -1
    for i, (name, nodes) in enumerate(runs):
        if i <= end and joined:
            joined[-1][1].extend(nodes)
        else:
            joined.append((name, list(nodes)))
        end = max(end, upto[i])
    return joined


def _unique(runs: list[tuple[str, list[fx.Node]]]) -> list[tuple[str, list[fx.Node]]]:
    seen: dict[str, int] = {}
    named = []
    for name, nodes in runs:
        name = name or "model"
        seen[name] = seen.get(name, 0) + 1
        named.append((name if seen[name] == 1 else f"{name}#{seen[name]}", nodes))
    return named
