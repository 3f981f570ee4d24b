"""Bytes that one host sends over the network in a step of sharded data parallelism, from the sizes alone.

MiCS (VLDB 2022) 3.3 and 3.4: M bytes of weights, shared by the p ranks of a partition group, k ranks on each host, R
replicas of the group, s micro-batches. Ranks are numbered host by host, so one connection of a ring over several hosts
leaves each host; every rank of a ring over n sends each of n parts but its own once per round:

- a gather over a ring: (p-1) M/p leave each host that the ring passes;
- a hierarchical gather: k rings in parallel, each over the p/k ranks of one local number, (p-k) M/p in all;
- a sum over a ring: twice as much, 2 (p-1) M/p: a scatter of sums, then a gather. Gloo also scatters sums in this way
  (torch 2.13), so that FSDP2 pays twice for each scatter on a CPU;
- a scatter of sums by exchange, in which each rank sends every other rank its row: k (p-k) M/p;
- a hierarchical scatter, with rows added up inside the hosts first: (p-k) M/p;
- a sum across replicas: each of the min(p, k) ranks of a host that keep different parts is in its own ring over R,
  2 (R-1)/R of M/p each.

With two hops (MiCS 3.4), sums across replicas are made once a step; without, once per micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

RING, EXCHANGE, HIERARCHICAL = "ring", "exchange", "hierarchical"


@dataclass(frozen=True)
class Fleet:
    """`hosts` with `per_host` ranks each, and a model of which `model_bytes` are gathered and summed."""

    hosts: int
    per_host: int
    model_bytes: float

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host

    def gather(self, shards: int, how: str = RING) -> float:
        """Bytes to gather the weights of the whole model from `shards` parts."""
        crossing = 0.0 if shards <= self.per_host else 1 - self._ranks_inside(how) / shards
        return crossing * self.model_bytes

    def scatter(self, shards: int, how: str = RING) -> float:
        """Bytes to sum the gradients of the whole model, of which each of the `shards` ranks keeps its part."""
        if shards <= self.per_host:
            return 0.0
        if how == RING:
            return 2 * (shards - 1) / shards * self.model_bytes
        whole = (shards - self.per_host) / shards * self.model_bytes
        return whole * self.per_host if how == EXCHANGE else whole

    def sum_replicas(self, shards: int) -> float:
        """Bytes to sum every part over the replicas of the group of `shards`."""
        replicas = self.ranks // shards
        if self.hosts == 1:
            return 0.0
        rings = min(shards, self.per_host)
        return rings * 2 * (replicas - 1) / replicas * self.model_bytes / shards

    def step(
        self, shards: int, gathers: int, scatters: int, sums: int, gather_how: str = RING, scatter_how: str = RING
    ) -> float:
        """Bytes of these numbers of gathers and scatters of the whole model, and of sums over replicas."""
        return (
            gathers * self.gather(shards, gather_how)
            + scatters * self.scatter(shards, scatter_how)
            + sums * self.sum_replicas(shards)
        )

    def _ranks_inside(self, how: str) -> int:
        """The number of ranks of a host whose parts need not come from another host; 1 with one ring for all."""
        return self.per_host if how == HIERARCHICAL else 1
