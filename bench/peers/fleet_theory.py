"""Bytes that one host sends over the network in a step of sharded data parallelism, from the sizes alone.

MiCS (VLDB 2022) 3.3 and 3.4: M bytes of weights, shared by the p ranks of a partition group, k ranks on each host, R
replicas of the group, s micro-batches. Ranks are numbered host by host, so of a ring over several hosts one connection
leaves each host; every rank of a ring over n sends each of n parts but its own once per round:

- a gather over a ring: (p-1) M/p leave each host that the ring passes;
- a hierarchical gather: k rings in parallel, each over the p/k ranks of one local number, (p-k) M/p in all;
- a sum over a ring: twice as much, 2 (p-1) M/p: a scatter of sums, then a gather. Gloo scatters sums by this too
  (torch 2.13), so that FSDP2 pays twice for each scatter on a CPU;
- a scatter of sums by exchange, in which each rank sends every other one its row: k (p-k) M/p;
- a hierarchical scatter, rows added up inside the hosts first: (p-k) M/p;
- a sum across replicas: each of the min(p, k) ranks of a host that keep different parts is in a ring over R of its own,
  2 (R-1)/R of M/p each.

Two hops (MiCS 3.4): sums across replicas are made once a step. Without, they are made once a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

RING, EXCHANGE, HIERARCHICAL = "ring", "exchange", "hierarchical"


@dataclass(frozen=True)
class Fleet:
    """`hosts` with `per_host` ranks each, and a model of `model_bytes`, as gathered and summed."""

    hosts: int
    per_host: int
    model_bytes: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def gather(self, shards: int, how: str = RING) -> float:
        """Weights of the whole model out of `shards` parts."""
        crossing = 0.0 if shards <= self.per_host else 1 - self._inside(how) / shards
        return crossing * self.model_bytes

    def scatter(self, shards: int, how: str = RING) -> float:
        """Sums of the gradients of the whole model, each rank of the `shards` keeping its part."""
        if shards <= self.per_host:
            return 0.0
        if how == RING:
            return 2 * (shards - 1) / shards * self.model_bytes
        whole = (shards - self.per_host) / shards * self.model_bytes
        return whole * self.per_host if how == EXCHANGE else whole

    def sum_replicas(self, shards: int) -> float:
        """Sums of every part over the replicas of the group of `shards`."""
        replicas = self.ranks // shards
        if self.hosts == 1:
            return 0.0
        rings = min(shards, self.per_host)
        return rings * 2 * (replicas - 1) / replicas * self.model_bytes / shards

    def step(
        self, shards: int, gathers: int, scatters: int, sums: int, gather_how: str = RING, scatter_how: str = RING
    ) -> float:
        """So many gathers and scatters of the whole model and sums over replicas."""
        return (
            gathers * self.gather(shards, gather_how)
            + scatters * self.scatter(shards, scatter_how)
            + sums * self.sum_replicas(shards)
        )

    def _inside(self, how: str) -> int:
        """Ranks of a host whose parts need not come from elsewhere: with one ring for all, only one counts."""
        return self.per_host if how == HIERARCHICAL else 1
