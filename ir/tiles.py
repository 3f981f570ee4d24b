"""Token-wise parts of a model's graph that run over tiles of tokens: how their nodes are marked, and found again.

`tile-sequence` marks the nodes of a part, which follow each other, under `MARK` in their meta. Without the
marks they are the same step, whole. Who runs or prints nodes takes those of a part as one step (`with_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

MARK = "tile"


@dataclass(frozen=True)
class TileMark:
    """The roles of a node in its part. `dims`: for each node that it reads, in order, the dimension along which that
    value has its tokens, None for one that every tile needs whole; `result`: the same for its own tensor, None where it
    has several; `each`: the elements along it per token, for example one for each row. `weights`: the parameters that
    it reads and that get gradients, by dotted name."""

    part: str
    tokens: int
    dims: tuple[int | None, ...]
    result: int | None
    each: int = 1
    weights: tuple[str, ...] = ()


@dataclass(eq=False)
class TiledPart:
    """A part: its nodes in order, what they read from outside without `get_attr` nodes, and which of them others read;
    with the dimensions along which these have their tokens."""

    name: str
    tokens: int
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    dims: list[int | None]
    outputs: list[fx.Node]
    results: list[int]
    weights: list[str]

    @property
    def num_tiles(self) -> int:
        node, dim = next((node, dim) for node, dim in zip(self.inputs, self.dims) if dim is not None)
        return -(-int(node.meta["val"].shape[dim]) // self.tokens)


def mark_of(node: fx.Node) -> TileMark | None:
    found: TileMark | None = node.meta.get(MARK)
    return found


def with_parts(steps: Sequence[Any]) -> list[Any]:
    """The steps in order, with a `TiledPart` in place of the nodes of each part. Nodes between these come before
    the part."""
    last = {mark.part: i for i, s in enumerate(steps) if isinstance(s, fx.Node) and (mark := mark_of(s))}
    members: dict[str, list[fx.Node]] = {name: [] for name in last}
    found: list[Any] = []
    for i, step in enumerate(steps):
        mark = mark_of(step) if isinstance(step, fx.Node) else None
        if mark is None:
            found.append(step)
            continue
        members[mark.part].append(step)
        if last[mark.part] == i:
            found.append(_part(mark, members[mark.part]))
    return found


def unread_parts(nodes: Sequence[fx.Node]) -> list[TiledPart]:
    """The parts among these nodes whose results none of them reads: their forward alone is of use to others."""
    own = set(nodes)
    parts = [step for step in with_parts(nodes) if isinstance(step, TiledPart)]
    return [part for part in parts if not any(u in own and u not in part.nodes for n in part.outputs for u in n.users)]


def _part(mark: TileMark, nodes: list[fx.Node]) -> TiledPart:
    inside = set(nodes)
    dims: dict[fx.Node, int | None] = {}
    weights: dict[str, None] = {}
    for node in nodes:
        own: TileMark = node.meta[MARK]
        weights.update(dict.fromkeys(own.weights))
        for operand, dim in zip(node.all_input_nodes, own.dims, strict=True):
            if operand not in inside and operand.op != "get_attr":
                dims.setdefault(operand, dim)
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    results = [node.meta[MARK].result for node in outputs]
    assert None not in results, f"{mark.part} gives a value that is no tensor"
    return TiledPart(mark.part, mark.tokens, nodes, [*dims], [*dims.values()], outputs, results, [*weights])
