"""`coarsen`: op graph to blocks.

In: the op graph. Out: `draft.blocks`, runs of consecutive nodes, so no cycle can arise. A run follows one element of
the user's module lists ("transformer.h.3"); nodes between them are cut at modules that own parameters. A module that
is called again (a layer shared by all depths) is a block per call: "encoder.layer", "encoder.layer#2". Nodes without
parameters join the run before them. The pass never separates a base from what writes it in place, a buffer's readers
from its writers, or a value that is no tensor from its readers. Where the members of a team exchange values, a block
begins (`graph/divide/exchanges.py`). With `level=operator` blocks are single operators
(`graph/operator_blocks.py`); each still knows its layer, so that a stage with all operators of a layer prints it as
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from ...graph.blocks import Block, node_outputs
from ...graph.costs.measured import measure_blocks
from ...graph.costs.stage import storages
from ...graph.layers import find_blocks
from ...graph.operators.calls import unknown_call
from ...graph.opgraph import OpGraph
from ...ir.errors import PassError, PlanError
from ..base import Pass
from ..decisions import Decision
from ..draft import Draft


@dataclass(frozen=True)
class Coarsen(Pass):
    """`level`: "layer" for the elements of the model's module lists and the runs of nodes between them, or
    "operator"."""

    name: ClassVar[str] = "coarsen"
    rank: ClassVar[int] = 20
    gives: ClassVar[tuple[str, ...]] = ("blocks",)
    # block -> the number of its op-graph nodes, in order
    decides: ClassVar[tuple[Decision, ...]] = (Decision("blocks", dict[str, int]),)
    level: str = "layer"

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        return []

    def plan(self, draft: Draft) -> dict[str, int]:
        """Each block's number of nodes, by name, in order. Raises `PlanError` for a model without parameters in use."""
        blocks = _find(draft.graph, self.level)
        if not blocks:
            raise PlanError(
                f"model: {type(draft.graph.model).__name__}'s loss depends on no parameter; there is nothing to train"
            )
        return {block.name: len(block.nodes) for block in blocks}

    def rewrite(self, draft: Draft, decision: dict[str, int]) -> None:
        blocks = _find(draft.graph, self.level)
        if {block.name: len(block.nodes) for block in blocks} != decision:
            found = next((b.name for b in blocks if b.name not in decision), next(iter(decision), ""))
            raise PassError(f"the plan's blocks are not those of this model; the first that differs is {found!r}")
        first = draft.machine.devices[0]
        gaps = [device.gaps_bytes for device in draft.machine.devices if device.gaps_bytes is not None]
        draft.blocks = measure_blocks(draft.graph, blocks, first.kind, min(gaps, default=None))
        if draft.options.compile_stages:
            draft.blocks = _add_compiled_peaks(draft.graph, draft.blocks)
        told = _remarks(draft.graph, draft.blocks)
        if draft.options.profiler is not None:
            draft.blocks = draft.options.profiler(draft.graph, draft.blocks, draft.machine)
            told.append(f"times of blocks were measured on {', '.join(draft.blocks[0].seconds)}")
        if told:
            draft.notes[self.name] = "; ".join(told)


def _find(graph: OpGraph, level: str) -> list[Block]:
    """The model's blocks, which a rewrite asks for again after its plan has found them."""
    key = ("blocks", level)
    if key not in graph.known:
        graph.known[key] = find_blocks(graph, level)
    found: list[Block] = graph.known[key]
    return found


def _add_compiled_peaks(graph: OpGraph, blocks: list[Block]) -> list[Block]:
    """Add the memory that torch.compile's backward of a repeated layer holds to its end, and that backward as written
    releases: the gradients of its parameters, and the gradient that came to it."""
    times, nodes = Counter(block.hash for block in blocks), dict[str, list[fx.Node]]()
    for block in blocks:
        nodes.setdefault(block.layer or block.name, []).extend(block.nodes)

    def held_bytes(layer: str) -> int:
        trained = {id(p): p for n in nodes[layer] for p in graph.node_parameters(n).values() if p.requires_grad}
        own = sum(p.numel() * graph.compute_dtype(p).itemsize for p in trained.values())
        return own + sum(storages(node_outputs(tuple(nodes[layer])), with_gradient=True).values())

    def add_held_bytes(block: Block) -> Block:
        peak_bytes = block.cost.backward_peak_bytes + held_bytes(block.layer or block.name)
        return block.with_cost(replace(block.cost, backward_peak_bytes=peak_bytes))

    return [add_held_bytes(block) if times[block.hash] > 1 else block for block in blocks]


def _remarks(graph: OpGraph, blocks: list[Block]) -> list[str]:
    uncounted = [block for block in blocks if block.cost.uncounted]
    names = sorted({name.removeprefix("aten::") for block in uncounted for name in block.cost.uncounted})
    found = [f"peaks leave out what {', '.join(names)} may hold on a GPU while they run"] if names else []
    # One call of each function at each line: parts of a table differ by their numbers alone.
    alike = {(node.target, node.meta.get("source")): node for block in uncounted for node in block.nodes}
    return found + sorted({unknown_call(graph, node) for node in alike.values()} - {""})
