"""Blocks as a graph of integers, and clusters of it that never form a cycle: the basis of Mixed-pipe (FTPipe 4.1).

In: blocks with costs. Out: `BlockGraph`, seconds in integer nanoseconds and values in bytes, and `Clusters`, in which
edges are contracted while a topological order is kept up to date (Pearce and Kelly's dynamic topological sort).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...graph.blocks import Block
from ...graph.boundaries import narrow_nodes, value_bytes
from ...graph.costs.stage_time import block_seconds
from ...graph.opgraph import OpGraph, value_tensors
from ...ir.machine.hardware import Hardware
from .block_sets import BlockValues, Integers

NANO = 1e9


@dataclass(frozen=True)
class BlockValue:
    """A value that one block hands to others. `readers` are other blocks."""

    maker: int
    readers: tuple[int, ...]
    bytes: int
    has_gradient: bool


@dataclass(frozen=True)
class BlockGraph:
    """Blocks 0 to n - 1 in topological order. `made` and `read`: per block the indices of values."""

    scopes: list[tuple[str, ...]]  # per block the modules around it
    forward_ns: list[list[int]]  # per device, per block
    load_ns: list[list[int]]  # per device, per block: forward, rematerialisation and backward
    values: list[BlockValue]
    made: list[list[int]]
    read: list[list[int]]
    succ: list[set[int]]
    pred: list[set[int]]

    @property
    def num_blocks(self) -> int:
        return len(self.scopes)

    @cached_property
    def ends(self) -> BlockValues:
        return BlockValues((v.maker for v in self.values), (v.readers for v in self.values), self.read)

    @cached_property
    def neighbours(self) -> list[set[int]]:
        """Per block those that it reads and those that read it."""
        return [a | b for a, b in zip(self.pred, self.succ)]

    @cached_property
    def prefixes(self) -> list[list[tuple[str, ...] | None]]:
        """By depth, per block the outermost modules around it; None where there are fewer."""
        depths = range(1 + max((len(scope) for scope in self.scopes), default=0))
        return [[scope[:n] if len(scope) >= n else None for scope in self.scopes] for n in depths]

    @cached_property
    def times_ns(self) -> tuple[Integers, Integers]:
        """`forward_ns` and `load_ns`, [device, block]."""
        return np.array(self.forward_ns), np.array(self.load_ns)


def block_graph(
    blocks: Sequence[Block], hardware: Hardware, precision: str, graph: OpGraph | None = None
) -> BlockGraph:
    """Seconds of every block on every device, and what the blocks hand to each other, in the types that `graph` says
    for values between stages."""
    narrow = frozenset() if graph is None else graph.once(narrow_nodes)
    maker = {node: i for i, block in enumerate(blocks) for node in block.outputs}
    readers: dict[int, list[int]] = {}
    nodes = {node: k for k, node in enumerate(maker)}
    read: list[list[int]] = []
    for i, block in enumerate(blocks):
        read.append([nodes[node] for node in block.inputs if node in nodes])
        for k in read[-1]:
            readers.setdefault(k, []).append(i)
    values, made = [], [[] for _ in blocks]  # type: tuple[list[BlockValue], list[list[int]]]
    succ: list[set[int]] = [set() for _ in blocks]
    pred: list[set[int]] = [set() for _ in blocks]
    for node, k in nodes.items():
        tensors = list(value_tensors(node.meta.get("val")))
        size = sum(t.numel() * t.element_size() for t in tensors)
        if graph is not None and node in narrow:
            size = value_bytes(graph, node, narrow)
        values.append(BlockValue(maker[node], tuple(readers.get(k, ())), size, any(t.requires_grad for t in tensors)))
        made[maker[node]].append(k)
        for reader in readers.get(k, ()):
            succ[maker[node]].add(reader)
            pred[reader].add(maker[node])
    forward, load = _seconds(blocks, hardware, precision)
    scopes = [tuple(block.name.partition("#")[0].split(".")[:-1]) for block in blocks]
    return BlockGraph(scopes, forward, load, values, made, read, succ, pred)


def _seconds(blocks: Sequence[Block], hardware: Hardware, precision: str) -> tuple[list[list[int]], list[list[int]]]:
    """Nanoseconds of forward, and of the whole, per device and block. Equal devices share their lists."""
    known: dict[str, tuple[list[int], list[int]]] = {}
    rows = []
    for device in hardware.devices:
        look = device.model_copy(update={"root_complex": 0, "name": "any"}).model_dump_json()
        look = device.name if any(device.name in block.seconds for block in blocks) else look
        if look not in known:
            took = [block_seconds(block, device, precision) for block in blocks]
            forward = [round(NANO * s.forward_s) for s in took]
            known[look] = forward, [f + round(NANO * s.long_backward_s) for f, s in zip(forward, took)]
        rows.append(known[look])
    return [forward for forward, _ in rows], [load for _, load in rows]


class Clusters:
    """A partition of a graph's nodes into clusters whose quotient is acyclic. A cluster is named by a member.

    `load_ns` and `bytes` of a cluster are the sums of its members'.
    """

    def __init__(self, succ: Sequence[Iterable[int]], load_ns: Sequence[int], num_bytes: Sequence[int]):
        self.home = list(range(len(succ)))  # node -> its cluster
        self.members = {i: [i] for i in self.home}
        self.succ = {i: set(row) for i, row in enumerate(succ)}
        self.pred: dict[int, set[int]] = {i: set() for i in self.home}
        for i, row in self.succ.items():
            for j in row:
                self.pred[j].add(i)
        self.load_ns = dict(enumerate(load_ns))
        self.bytes = dict(enumerate(num_bytes))
        self.order: list[int | None] = list(range(len(succ)))  # nodes are given in topological order
        self.place = {i: i for i in self.home}

    def copy(self) -> Clusters:
        twin = object.__new__(Clusters)
        twin.home, twin.order = list(self.home), list(self.order)
        twin.members = {c: list(own) for c, own in self.members.items()}
        twin.succ = {c: set(row) for c, row in self.succ.items()}
        twin.pred = {c: set(row) for c, row in self.pred.items()}
        twin.load_ns, twin.bytes, twin.place = dict(self.load_ns), dict(self.bytes), dict(self.place)
        return twin

    def __len__(self) -> int:
        return len(self.members)

    def list_in_order(self) -> list[int]:
        found = [c for c in self.order if c is not None]
        if 2 * len(found) < len(self.order):  # the places of clusters that were merged
            self.order = list(found)
            self.place = {c: i for i, c in enumerate(found)}
        return found

    def neighbours(self, cluster: int) -> set[int]:
        return self.succ[cluster] | self.pred[cluster]

    def merge(self, a: int, b: int) -> bool:
        """Make two clusters one, named by the earlier of them in the order; False where that would close a cycle."""
        if self.place[a] > self.place[b]:
            a, b = b, a
        after = self._clusters_between(a, b)
        if after is None:
            return False
        begin, end = self.place[a], self.place[b]
        if end == begin + 1:
            self.order[end] = None
            self._absorb(a, b)
            return True
        inside = [c for c in self.order[begin : end + 1] if c is not None and c != a and c != b]
        before = [c for c in inside if c not in after]
        region: list[int | None] = [*before, a, *(c for c in inside if c in after)]
        self.order[begin : end + 1] = region + [None] * (end + 1 - begin - len(region))
        for place, cluster in enumerate(region, begin):
            self.place[cluster] = place  # type: ignore[index]
        self._absorb(a, b)
        return True

    def _clusters_between(self, a: int, b: int) -> set[int] | None:
        """The clusters that a leads to, before b in the order; None if one of them leads to b."""
        last = self.place[b]
        found: set[int] = set()
        stack = [c for c in self.succ[a] if c != b]
        while stack:
            cluster = stack.pop()
            if cluster in found or self.place[cluster] > last:
                continue
            if b in self.succ[cluster]:
                return None
            found.add(cluster)
            stack += self.succ[cluster]
        return found

    def _absorb(self, a: int, b: int) -> None:
        for node in self.members[b]:
            self.home[node] = a
        self.members[a] += self.members.pop(b)
        for forward, backward in ((self.succ, self.pred), (self.pred, self.succ)):
            for other in forward.pop(b):
                backward[other].discard(b)
                if other != a:
                    backward[other].add(a)
                    forward[a].add(other)
            forward[a].discard(b)
        self.load_ns[a] += self.load_ns.pop(b)
        self.bytes[a] += self.bytes.pop(b)
        del self.place[b]
