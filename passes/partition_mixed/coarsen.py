"""Mixed-pipe, step 1: blocks to L clusters that are worth a stage (FTPipe 4.1.1).

In: the graph of blocks. Out: `Clusters`. Blocks that compute nothing join their lightest neighbour; those whose values
are above the 99th percentile in bytes, and take longer than they compute, join the neighbour they share most with; then
blocks of one module join, innermost modules first, and clusters whose messages would take longer than their
computation (no CCO property) join a neighbour; at last the clusters grow around L centers until nothing else is left.
No cluster outgrows a device, and no contraction closes a cycle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .graph import BlockGraph, Clusters

TALKATIVE = 0.99  # the percentile of traffic above which a block is merged
Centers = Callable[[Clusters, int], list[int]]


@dataclass(frozen=True)
class Limits:
    """The bounds of a cluster while it grows: bytes on one device, and nanoseconds per byte between devices."""

    most_bytes: int
    ns_per_byte: float


def merge_small(clusters: Clusters, graph: BlockGraph, limits: Limits) -> None:
    """Merge blocks without computation, then those with the most traffic."""
    for c in clusters.list_in_order():
        if c in clusters.members and clusters.load_ns[c] == 0:
            lightest = sorted(clusters.neighbours(c), key=lambda n: (clusters.load_ns[n], clusters.place[n]))
            _merge_first(clusters, c, lightest, limits)
    traffic = {c: sum(ends_bytes(clusters, graph, c)) for c in clusters.list_in_order()}
    bound = sorted(traffic.values())[int(TALKATIVE * (len(traffic) - 1))]
    for c in [c for c, size in traffic.items() if size > bound]:
        if c in clusters.members and not is_hidden(clusters, graph, c, limits):
            _merge_first(clusters, c, closest(clusters, graph, c), limits)


def merge_by_type(clusters: Clusters, graph: BlockGraph, count: int, most_ns: float, limits: Limits) -> None:
    """Contract edges inside of one module, the innermost modules first, up to `most_ns` of computation; then clusters
    that lack the CCO property. At least `count` clusters are left."""
    for scopes in reversed(graph.prefixes[1:]):
        changed = True
        while changed:
            changed = False
            for a in clusters.list_in_order():
                scope = scopes[a]
                if scope is None or a not in clusters.members or len(clusters) <= count:
                    continue
                own_ns, load_ns = clusters.load_ns[a], clusters.load_ns
                alike = [b for b in clusters.succ[a] if scopes[b] == scope and own_ns + load_ns[b] <= most_ns]
                for b in sorted(alike, key=clusters.place.__getitem__) if len(alike) > 1 else alike:
                    if _merge(clusters, a, b, limits):
                        changed = True
                        break
    _merge_to_hide(clusters, graph, count, limits)


def _merge_to_hide(clusters: Clusters, graph: BlockGraph, count: int, limits: Limits) -> None:
    """Merge until messages hide: what a cluster receives, or sends, takes no longer than it computes."""
    waiting = clusters.list_in_order()
    while waiting and len(clusters) > count:
        c = waiting.pop()
        talks = c in clusters.members and not is_hidden(clusters, graph, c, limits)
        if talks and _merge_first(clusters, c, closest(clusters, graph, c), limits):
            waiting.append(clusters.home[c])


def is_hidden(clusters: Clusters, graph: BlockGraph, cluster: int, limits: Limits) -> bool:
    """The CCO property: forward and backward traffic each take no longer than the computation (eq. 1)."""
    return max(ends_bytes(clusters, graph, cluster)) * limits.ns_per_byte <= clusters.load_ns[cluster]


def ends_bytes(clusters: Clusters, graph: BlockGraph, cluster: int) -> tuple[int, int]:
    """Bytes that enter a cluster and that leave it, each value once."""
    arriving = leaving = 0
    seen: set[int] = set()
    for block in clusters.members[cluster]:
        for k in graph.read[block]:
            if k not in seen and clusters.home[graph.values[k].maker] != cluster:
                seen.add(k)
                arriving += graph.values[k].bytes
        for k in graph.made[block]:
            if any(clusters.home[r] != cluster for r in graph.values[k].readers):
                leaving += graph.values[k].bytes
    return arriving, leaving


def merge_around_centers(clusters: Clusters, graph: BlockGraph, count: int, centers: Centers, limits: Limits) -> None:
    """Grow `count` clusters in turns, the lightest first, until all others have joined one of them. What no center can
    take becomes a center itself."""
    chosen = set(centers(clusters, count))
    stuck: set[int] = set()
    known: dict[int, dict[int, int]] = {}  # the traffic of clusters of which neither they nor neighbours have changed
    while len(clusters) > len(chosen):
        able = [c for c in chosen if c not in stuck]
        if not able:
            rest = max((c for c in clusters.members if c not in chosen), key=clusters.load_ns.__getitem__)
            chosen.add(rest)
            stuck.clear()
            continue
        center = min(able, key=lambda c: (clusters.load_ns[c], clusters.place[c]))
        if center not in known:
            known[center] = traffic_of(clusters, graph, center)
        free = [n for n in _sort_by_traffic(clusters, known[center]) if n not in chosen]
        if _merge_first(clusters, center, free, limits):
            grown = clusters.home[center]
            for changed in (center, grown, *clusters.neighbours(grown)):
                known.pop(changed, None)
            chosen.discard(center)
            chosen.add(grown)
            stuck.clear()
        else:
            stuck.add(center)


def heaviest(clusters: Clusters, count: int) -> list[int]:
    """Centers: the clusters with the most computation."""
    return sorted(clusters.list_in_order(), key=lambda c: -clusters.load_ns[c])[:count]


def evenly_by_load(clusters: Clusters, count: int) -> list[int]:
    """Centers: one in the middle of each equal part of the computation, along the order."""
    return _evenly(clusters, count, clusters.load_ns)


def evenly_by_both(clusters: Clusters, count: int) -> list[int]:
    """Centers: the same, where a cluster weighs its part of the computation or of the memory, whichever is larger."""
    load_ns, num_bytes = sum(clusters.load_ns.values()) or 1, sum(clusters.bytes.values()) or 1
    both = {c: max(clusters.load_ns[c] / load_ns, clusters.bytes[c] / num_bytes) for c in clusters.members}
    return _evenly(clusters, count, both)


def _evenly(clusters: Clusters, count: int, weight: Mapping[int, float]) -> list[int]:
    step = sum(weight.values()) / count
    found: list[int] = []
    passed = 0.0
    for c in clusters.list_in_order():
        passed += weight[c]
        if passed >= (len(found) + 0.5) * step and len(found) < count:
            found.append(c)
    return found or clusters.list_in_order()[:1]


def traffic_of(clusters: Clusters, graph: BlockGraph, cluster: int) -> dict[int, int]:
    """Bytes that a cluster shares with each neighbour, each value once."""
    found: dict[int, int] = defaultdict(int)
    seen: set[tuple[int, int]] = set()
    for block in clusters.members[cluster]:
        ends = [(k, graph.values[k].maker) for k in graph.read[block]]
        ends += [(k, reader) for k in graph.made[block] for reader in graph.values[k].readers]
        for k, other in ends:
            home = clusters.home[other]
            if home != cluster and (k, home) not in seen:
                seen.add((k, home))
                found[home] += graph.values[k].bytes
    return found


def closest(clusters: Clusters, graph: BlockGraph, cluster: int) -> list[int]:
    """A cluster's neighbours, those first that it shares the most bytes with; of equals, the lightest first."""
    return _sort_by_traffic(clusters, traffic_of(clusters, graph, cluster))


def _sort_by_traffic(clusters: Clusters, shared: Mapping[int, int]) -> list[int]:
    return sorted(shared, key=lambda n: (-shared[n], clusters.load_ns[n], clusters.place[n]))


def _merge_first(clusters: Clusters, cluster: int, others: list[int], limits: Limits) -> bool:
    return any(_merge(clusters, cluster, other, limits) for other in others)


def _merge(clusters: Clusters, a: int, b: int, limits: Limits) -> bool:
    return clusters.bytes[a] + clusters.bytes[b] <= limits.most_bytes and clusters.merge(a, b)
