"""`tile-sequence`: token-wise parts of layers over tiles of tokens, forward and backward.

In: the op graph. Out: the same step, in which the nodes of each part are neighbours and marked (`ir/regions.py`). A
stage runs such a part by `functions.in_tiles`: forward keeps what enters it, backward computes each tile again before
it goes back through it, so that the values inside (of a MLP, of norms in fp32, of projections) exist for one tile at a
time. Attention, whose kernels need no tiles, is outside, and is not computed again. (Bekman et al. 2025, "Arctic Long
Sequence Training", 3.1, does this to the MLP of known models.) Logits are cut by `chunk-loss`, which need not compute
them a third time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import fx

from ...graph.edit import copy_graph, set_arguments
from ...graph.follow.tokens import sequence_lengths
from ...graph.opgraph import OpGraph
from ...graph.regions.token_wise import TokenPart, token_parts
from ...ir.errors import PassError
from ...ir.regions import MARK, TileMark
from ...ir.units import format_bytes
from ..base import Pass, PlanSoFar
from ..decisions import Decision
from ..draft import Draft
from .graph_pass import GraphPass

LEAST_TOKENS = 1024  # of a tile whose size is not given: smaller products reach less of a GPU's speed
TILE_SHARE = 1 / 64  # of the smallest device, for the values inside one tile
LARGE_TILES = 2  # the number of tiles from which on a part is worth cutting

Tiles = dict[str, int]  # part -> the number of tokens of a tile


@dataclass(frozen=True)
class TileSequence(GraphPass):
    """`tokens`: of each tile, or automatic: parts whose values are large for a device, in tiles that are not."""

    name: ClassVar[str] = "tile-sequence"
    rank: ClassVar[int] = 18
    # token-wise part -> the number of tokens of its tiles
    decides: ClassVar[tuple[Decision, ...]] = (Decision("tiles", dict[str, Annotated[int, Field(ge=2)]], {}),)
    automatic: ClassVar[tuple[str, ...]] = ("tokens",)
    closes: ClassVar[tuple[str, ...]] = (
        "drop-masks", "chunk-loss", "interleave-forwards", "split-vocabulary", "split-experts", "split-linear",
        "split-context", "split-width",
    )  # fmt: skip
    tokens: int = 0

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        return cls.with_or_without(best)

    def plan(self, draft: Draft) -> Tiles:
        """Raises `PassError` where `tokens` is given and no part of the model can be cut."""
        if not self.tokens and max(sequence_lengths(draft.graph), default=0) < LARGE_TILES * LEAST_TOKENS:
            return {}
        parts = token_parts(draft.graph, draft.machine.devices[0].kind)
        room_bytes = min(device.budget_bytes for device in draft.machine.devices)
        if self.tokens:
            found = {part.name: self.tokens for part in parts if self.tokens < part.length}
            if not found:
                raise PassError(f"tile-sequence: nothing can be cut into tiles of {self.tokens} tokens: {_why(draft)}")
            return found
        sizes = {part.name: tokens_of_tile(part, room_bytes) for part in parts}
        return {part.name: sizes[part.name] for part in parts if LARGE_TILES * sizes[part.name] <= part.length}

    def rewrite(self, draft: Draft, decision: Tiles) -> None:
        if not decision:
            return
        parts = {part.name: part for part in token_parts(draft.graph, draft.machine.devices[0].kind)}
        graph = copy_graph(draft.graph)
        for name, tokens in decision.items():
            if name not in parts:
                known = ", ".join(parts) or "none"
                raise PassError(f"tile-sequence: {name!r} is no token-wise part of this model; it has {known}")
            if not tokens >= 1:
                raise PassError(f"tile-sequence: {name!r} has tiles of {tokens} tokens; allowed are 1 or more")
            mark_part(graph, parts[name], tokens)
        graph.rebuild()
        draft.graph = graph
        draft.notes[self.name] = _note([parts[name] for name in decision], decision)


def tokens_of_tile(part: TokenPart, room_bytes: int) -> int:
    """The number of tokens of tiles that are small on a device with this room, all of about one size."""
    most = max(LEAST_TOKENS, int(TILE_SHARE * room_bytes * part.length / part.inside_bytes))
    return -(-part.length // -(-part.length // most))


def mark_part(graph: OpGraph, part: TokenPart, tokens: int) -> None:
    """Make the part's nodes neighbours in a copy of the graph in which it was found, and mark them."""
    copies = {node.name: node for node in graph.nodes}
    nodes = [copies[node.name] for node in part.nodes]
    _bring_together(graph, nodes)
    seen: set[int] = set()
    for node, twin in zip(nodes, part.nodes):
        if twin in part.args:
            set_arguments(node, fx.map_arg(part.args[twin], lambda n: copies[n.name]), node.kwargs)
        places = [part.facts.place(operand) for operand in twin.all_input_nodes]
        place = part.facts.place(twin)
        dims = tuple(
            None if at is None or n.op == "get_attr" else at.dim for n, at in zip(twin.all_input_nodes, places)
        )
        weights = []
        for reader in (node, *(n for n in node.all_input_nodes if n.op == "get_attr")):
            for name, parameter in graph.node_parameters(reader).items():
                if parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    weights.append(name)
        dim = None if place is None else place.dim
        each = 1 if dim is None else node.meta["val"].shape[dim] // part.length
        node.meta[MARK] = TileMark(part.name, tokens, dims, dim, each, tuple(weights))


def _bring_together(graph: OpGraph, nodes: list[fx.Node]) -> None:
    """Move a part's nodes before its last one, and what depends on them after it. Nothing between them is drawn or
    written in place, so it computes the same elsewhere."""
    order = graph.nodes
    inside, after = set(nodes), nodes[-1]
    depends: set[fx.Node] = set()
    for node in order[order.index(nodes[0]) : order.index(nodes[-1])]:
        if node in inside:
            nodes[-1].prepend(node)
        elif any(operand in inside or operand in depends for operand in node.all_input_nodes):
            depends.add(node)
            after.append(node)
            after = node


def _why(draft: Draft) -> str:
    if draft.graph.sizes:
        return "the sizes of its batches differ"
    parts = token_parts(draft.graph, draft.machine.devices[0].kind)
    if not parts:
        return "the model has no token-wise part of several calls"
    return f"its sequences have {parts[0].length} tokens"


def _note(parts: list[TokenPart], decision: Tiles) -> str:
    largest = max(parts, key=lambda part: part.inside_bytes)
    tokens = decision[largest.name]
    tiles = -(-largest.length // tokens)
    each = largest.inside_bytes * tokens // largest.length
    return (
        f"{len(parts)} token-wise parts run over tiles of tokens, {largest.name} in {tiles} tiles of {tokens}: "
        f"{format_bytes(each)} of values inside it at a time in place of {format_bytes(largest.inside_bytes)}"
    )
