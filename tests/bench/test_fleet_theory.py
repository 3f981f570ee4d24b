"""Bytes over the network in a step of sharded data parallelism: the formulas against a count of every message."""

from __future__ import annotations

import pytest

from penstock.bench.peers.fleet_theory import EXCHANGE, HIERARCHICAL, Fleet

M = 1.0


def ring_bytes(members: list[int], per_host: int, part: float, rounds: int) -> dict[int, float]:
    """The bytes that each host sends to others while every member passes `part` on to the next, for this number of
    rounds."""
    sent: dict[int, float] = {}
    for member, after in zip(members, [*members[1:], members[0]]):
        crosses = member // per_host != after // per_host
        sent[member // per_host] = sent.get(member // per_host, 0.0) + crosses * rounds * part
    return sent


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (2, 4), (4, 2), (4, 8), (2, 1)])
def test_formulas_count_what_rings_send(hosts: int, per_host: int) -> None:
    fleet = Fleet(hosts, per_host, M)
    for shards in (n for n in range(1, fleet.ranks + 1) if fleet.ranks % n == 0):
        group, part = list(range(shards)), M / shards
        around = ring_bytes(group, per_host, part, shards - 1)
        assert fleet.gather(shards) == pytest.approx(around[0])
        assert fleet.scatter(shards) == pytest.approx(2 * around[0])
        replicas = fleet.ranks // shards
        summed = [
            ring_bytes([r * shards + i for r in range(replicas)], per_host, part / replicas, 2 * (replicas - 1))
            for i in range(shards)
        ]
        assert fleet.sum_replicas(shards) == pytest.approx(sum(row.get(0, 0.0) for row in summed))
        if shards % per_host:
            continue
        parallel = [ring_bytes(group[i::per_host], per_host, part, shards // per_host - 1) for i in range(per_host)]
        assert fleet.gather(shards, HIERARCHICAL) == pytest.approx(sum(row[0] for row in parallel))
        pairs = [(a, b) for a in group for b in group if a < per_host <= b]
        assert fleet.scatter(shards, EXCHANGE) == pytest.approx(part * len(pairs))


def test_the_papers_figures() -> None:
    """(p-k)M/p against (p-1)M/p; at p = 16, k = 8 hierarchical gathers send 46.6 % less (MiCS 3.3)."""
    fleet = Fleet(2, 8, 16.0)
    assert (fleet.gather(16), fleet.gather(16, HIERARCHICAL)) == (15.0, 8.0)
    assert 1 - fleet.gather(16, HIERARCHICAL) / fleet.gather(16) == pytest.approx(0.466, abs=1e-3)
    assert fleet.gather(8) == fleet.scatter(8) == 0.0


def test_two_hops_pay_once_a_step() -> None:
    fleet, micro_batches = Fleet(2, 2, M), 4
    once = fleet.step(2, gathers=2, scatters=micro_batches, sums=1)
    assert fleet.step(2, gathers=2, scatters=micro_batches, sums=micro_batches) == pytest.approx(micro_batches * once)
