"""Regions of a model's graph that run as one step: how their nodes are marked, and found again.

A pass marks the nodes of a region, which follow each other, under `MARK` in their meta: `tile-sequence` what runs over
tiles of tokens, `fuse-pointwise` what runs as one kernel. Without the marks they are the same step. Who runs or prints
nodes takes those of a region as one step (`with_regions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

MARK = "region"


@dataclass(frozen=True)
class TileMark:
    """The roles of a node in its region. `dims`: for each node that it reads, in order, the dimension along which that
    value has its tokens, None for one that every tile needs whole; `result`: the same for its own tensor, None where it
    has several; `each`: the elements along it per token, for example one for each row. `weights`: the parameters that
    it reads and that get gradients, by dotted name."""

    region: str
    tokens: int
    dims: tuple[int | None, ...]
    result: int | None
    each: int = 1
    weights: tuple[str, ...] = ()

    @property
    def look(self) -> tuple[Any, ...]:
        """Equal for nodes in the same place of equal layers."""
        return self.region.rpartition("/")[2], self.tokens, self.dims, self.result


@dataclass(frozen=True)
class FuseMark:
    """The roles of a node in its region. `needed`: for each node that it reads, in order, whether backward of the
    region reads that value, if it comes from outside."""

    region: str
    needed: tuple[bool, ...]

    @property
    def look(self) -> tuple[Any, ...]:
        """Equal for nodes in the same place of equal layers."""
        return self.region.rpartition("/")[2], self.needed


Mark = TileMark | FuseMark


@dataclass(eq=False)
class Region:
    """The nodes of a region in order, what they read from outside, and which of them others read."""

    name: str
    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


@dataclass(eq=False)
class TiledRegion(Region):
    """A region over tiles of tokens, with the dimensions along which its inputs, without `get_attr` nodes, and its
    outputs have their tokens."""

    tokens: int
    dims: list[int | None]
    results: list[int]
    weights: list[str]

    @property
    def num_tiles(self) -> int:
        node, dim = next((node, dim) for node, dim in zip(self.inputs, self.dims) if dim is not None)
        return -(-int(node.meta["val"].shape[dim]) // self.tokens)


@dataclass(eq=False)
class FusedRegion(Region):
    """A region of one output as one kernel. `needed`: the places of those inputs that backward reads."""

    needed: list[int]

    @property
    def result(self) -> fx.Node:
        return self.outputs[0]


def mark_of(node: fx.Node) -> Mark | None:
    found: Mark | None = node.meta.get(MARK)
    return found


def with_regions(steps: Sequence[Any]) -> list[Any]:
    """The steps in order, with a `Region` in place of the nodes of each. Nodes between these come before the
    region."""
    last = {mark.region: i for i, s in enumerate(steps) if isinstance(s, fx.Node) and (mark := mark_of(s))}
    members: dict[str, list[fx.Node]] = {name: [] for name in last}
    found: list[Any] = []
    for i, step in enumerate(steps):
        mark = mark_of(step) if isinstance(step, fx.Node) else None
        if mark is None:
            found.append(step)
            continue
        members[mark.region].append(step)
        if last[mark.region] == i:
            make = _tile_region if isinstance(mark, TileMark) else _fuse_region
            found.append(make(mark.region, members[mark.region]))
    return found


def unread_regions(nodes: Sequence[fx.Node]) -> list[TiledRegion]:
    """The regions in tiles among these nodes whose results none of them reads: their forward alone is of use to
    others."""
    own = set(nodes)
    found = [step for step in with_regions(nodes) if isinstance(step, TiledRegion)]
    return [r for r in found if not any(u in own and u not in r.nodes for n in r.outputs for u in n.users)]


def region_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes outside that these read, each once."""
    inside = set(nodes)
    return list(dict.fromkeys(operand for node in nodes for operand in node.all_input_nodes if operand not in inside))


def _outputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return [node for node in nodes if any(user not in inside for user in node.users)]


def _tile_region(name: str, nodes: list[fx.Node]) -> TiledRegion:
    marks: dict[fx.Node, TileMark] = {node: node.meta[MARK] for node in nodes}
    dims: dict[fx.Node, int | None] = {}
    weights: dict[str, None] = {}
    for node, mark in marks.items():
        weights.update(dict.fromkeys(mark.weights))
        for operand, dim in zip(node.all_input_nodes, mark.dims, strict=True):
            dims.setdefault(operand, dim)
    inputs = [node for node in region_inputs(nodes) if node.op != "get_attr"]
    outputs = _outputs(nodes)
    results = [result for node in outputs if (result := marks[node].result) is not None]
    assert len(results) == len(outputs), f"{name} gives a value that is no tensor"
    tokens = marks[nodes[0]].tokens
    return TiledRegion(name, nodes, inputs, outputs, tokens, [dims[node] for node in inputs], results, [*weights])


def _fuse_region(name: str, nodes: list[fx.Node]) -> FusedRegion:
    read = {a for n in nodes for a, needed in zip(n.all_input_nodes, n.meta[MARK].needed, strict=True) if needed}
    inputs, outputs = region_inputs(nodes), _outputs(nodes)
    return FusedRegion(name, nodes, inputs, outputs, [i for i, node in enumerate(inputs) if node in read])
