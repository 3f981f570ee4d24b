"""`fuse-pointwise`: a chain of pointwise calls runs as one kernel, forward and backward.

In: the op graph. Out: the same step, in which the nodes of each chain are neighbours and marked (`ir/regions.py`). A
stage runs such a chain by `functions.fuse`: forward reads what enters and writes the result, backward computes the
chain again from those of its inputs that gradients depend on, which are all that is saved. Norms that a model spells
out, rotary embeddings, gated activations are found by their calls, not by the names of models. (Dao et al. 2022,
"FlashAttention", 3.1: what bounds such calls is the traffic to memory.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...graph.edit import copy_graph
from ...graph.regions.call_chains import CallChain, call_chains
from ...ir.errors import PassError
from ...ir.regions import MARK, FuseMark
from ...ir.units import format_bytes
from ..decisions import Decision
from ..draft import Draft
from .graph_pass import GraphPass


@dataclass(frozen=True)
class FusePointwise(GraphPass):
    """It has no options."""

    name: ClassVar[str] = "fuse-pointwise"
    rank: ClassVar[int] = 19
    # chains of calls that run as one kernel each
    decides: ClassVar[tuple[Decision, ...]] = (Decision("fused", list[str], []),)
    closes: ClassVar[tuple[str, ...]] = (
        "drop-masks", "chunk-loss", "interleave-forwards", "split-vocabulary", "split-experts", "split-linear",
        "split-context", "split-width", "recompute-pointwise", "tile-sequence",
    )  # fmt: skip

    def plan(self, draft: Draft) -> list[str]:
        return [chain.name for chain in _chains(draft)]

    def rewrite(self, draft: Draft, decision: list[str]) -> None:
        if not decision:
            draft.notes[self.name] = "no chain of calls is fused"
            return
        chains = {chain.name: chain for chain in _chains(draft)}
        for name in decision:
            if name not in chains:
                known = ", ".join(chains) or "none"
                raise PassError(f"fuse-pointwise: {name!r} is no chain of calls of this model; it has {known}")
        graph = copy_graph(draft.graph)
        copies = {node.name: node for node in graph.nodes}
        for name in decision:
            chain = chains[name]
            for node in chain.nodes:
                twin = copies[node.name]
                if node is not chain.nodes[-1]:
                    copies[chain.nodes[-1].name].prepend(twin)
                needed = tuple(operand in chain.needed for operand in node.all_input_nodes)
                twin.meta[MARK] = FuseMark(name, needed)
        graph.rebuild()
        draft.graph = graph
        draft.notes[self.name] = _note([chains[name] for name in decision])


def _chains(draft: Draft) -> Sequence[CallChain]:
    if draft.graph.pointwise_again:
        raise PassError("fuse-pointwise after recompute-pointwise: what a kernel computes inside is not seen. Leave "
                        "one of them out")  # fmt: skip
    if draft.graph.sizes or draft.graph.symbols:
        raise PassError("fuse-pointwise with dynamic_shapes: a chain's kernels are made for one size of each tensor. "
                        "Leave one of them out")  # fmt: skip
    return call_chains(draft.graph, draft.machine.devices[0].kind)


def _note(chains: Sequence[CallChain]) -> str:
    calls = sum(len(chain.nodes) for chain in chains)
    spared = format_bytes(sum(chain.spared_bytes for chain in chains))
    return f"{calls} calls in {len(chains)} kernels; a forward of a micro-batch moves {spared} less"
