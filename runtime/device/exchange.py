"""Gathers and reduce-scatters on the rows of an existing buffer: each member gives one row, and every row arrives at
its final place.

In host memory, members pass rows to each other over gloo, point to point, because gloo's own collectives copy into
buffers that they allocate for every call. Between GPUs, NCCL does the work.

A hierarchical gather (MiCS 3.3) has three steps: each member gathers from the members at its own place on the other
hosts, all places at the same time; the rows are put in order; then each host's members gather from each other, for all
hosts' rows in one batch. Every row is received at its final place, so that the second step moves nothing. A link
between two hosts then carries (p - k) / p of the value in place of (p - 1) / p, with k of p members on a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Seats:
    """The members of a group by host, as positions in the group. `ring`: all members, those of a host next to each
    other; `hosts`: the members host by host, empty unless they form a grid of several places on several hosts."""

    index: int
    ring: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]

    @property
    def seats_of_hosts(self) -> tuple[int, ...]:
        """The members at this member's place on all hosts, host by host."""
        place = self.here.index(self.index)
        return tuple(host[place] for host in self.hosts)

    @property
    def here(self) -> tuple[int, ...]:
        """The members on this member's host."""
        return next(host for host in self.hosts if self.index in host)


def seats_of(hosts: Sequence[int], index: int) -> Seats:
    """`hosts`: the host of each member of the group; `index`: this member's position."""
    names = list(dict.fromkeys(hosts))
    rows = tuple(tuple(i for i, host in enumerate(hosts) if host == name) for name in names)
    even = len(rows) > 1 and len({len(row) for row in rows}) == 1 and len(rows[0]) > 1
    return Seats(index, tuple(i for row in rows for i in row), rows if even else ())


def gather_rows(group: Any, seats: Seats, rows: Tensor, hierarchical: bool) -> None:
    """Fill all of `rows` (members, n), of which only this member's own is filled so far. If the seats are no grid, a
    hierarchical gather is a plain one."""
    stages = [(seats.seats_of_hosts, [[seat] for seat in seats.seats_of_hosts])] if hierarchical and seats.hosts else []
    if stages:  # then a host's members exchange the rows that they have of all hosts
        places = range(len(seats.here))
        stages.append((seats.here, [[host[place] for host in seats.hosts] for place in places]))
    if rows.is_cuda:
        if not stages:
            group._allgather_base(rows.view(-1), rows[seats.index]).wait()
        for ring, blocks in stages:
            _trade(group, seats.index, ring, [[rows[seat] for seat in block] for block in blocks])
        return
    for ring, blocks in stages or [(seats.ring, [[seat] for seat in seats.ring])]:
        _pass_round(group, seats.index, ring, [[rows[seat] for seat in block] for block in blocks])


def _pass_round(group: Any, index: int, ring: Sequence[int], blocks: Sequence[Sequence[Tensor]]) -> None:
    """Each member of the ring sends its block to the next, and from then on the block that it received last."""
    own, count = ring.index(index), len(ring)
    after, before = ring[(own + 1) % count], ring[(own - 1) % count]
    for turn in range(count - 1):
        given, taken = blocks[(own - turn) % count], blocks[(own - turn - 1) % count]
        works = [group.recv([row], before, tag) for tag, row in enumerate(taken)]
        works += [group.send([row], after, tag) for tag, row in enumerate(given)]
        for work in works:
            work.wait()


def _trade(group: Any, index: int, ring: Sequence[int], blocks: Sequence[Sequence[Tensor]]) -> None:
    """Each member of the ring sends its block to every other member, in one batch on the current CUDA stream."""
    own = ring.index(index)
    others = [(other, block) for other, block in zip(ring, blocks) if other != index]
    given = [(other, mine) for other, _ in others for mine in blocks[own]]
    _exchange_messages(group, given, [(other, theirs) for other, block in others for theirs in block])


def trade_rows(group: Any, index: int, rows: Tensor) -> Tensor:
    """The rows of each member for this one. `rows` (members, n, ...) has this member's rows for each."""
    count, found = len(rows), torch.empty_like(rows)
    found[index].copy_(rows[index])
    if rows.is_cuda:
        others = [other for other in range(count) if other != index]
        _exchange_messages(
            group, [(other, rows[other]) for other in others], [(other, found[other]) for other in others]
        )
        return found
    for turn in range(1, count):
        to, source = (index + turn) % count, (index - turn) % count
        coming = group.recv([found[source]], source, 0)
        group.send([rows[to]], to, 0).wait()
        coming.wait()
    return found


def trade_counted(
    group: Any, index: int, rows: Tensor, given: Sequence[int], found: Tensor, taken: Sequence[int]
) -> None:
    """Fill `found` with what each member has for this one, the first member's rows first. `rows` (n, ...) has what this
    member has for each, in order; `given` and `taken` are the numbers of rows for and of each member, which both sides
    know: a message without rows is not sent."""
    mine, theirs = list(rows.split(list(given))), list(found.split(list(taken)))
    theirs[index].copy_(mine[index])
    count = len(mine)
    if rows.is_cuda:
        others = [other for other in range(count) if other != index]
        parts = [[(o, each[o]) for o in others if each[o].shape[0]] for each in (mine, theirs)]
        if any(parts):
            _exchange_messages(group, *parts)
        return
    for turn in range(1, count):
        to, source = (index + turn) % count, (index - turn) % count
        coming = group.recv([theirs[source]], source, 0) if taken[source] else None
        if given[to]:
            group.send([mine[to]], to, 0).wait()
        if coming is not None:
            coming.wait()


def pass_on(group: Any, index: int, count: int, value: Tensor, back: bool) -> Tensor:
    """The value of the member before this one, or after it; this member's own goes to the one on the other side."""
    before, after = (index - 1) % count, (index + 1) % count
    to, source = (before, after) if back else (after, before)
    found = torch.empty_like(value)
    if value.is_cuda:
        _exchange_messages(group, [(to, value)], [(source, found)])
        return found
    coming = group.recv([found], source, 0)
    group.send([value], to, 0).wait()
    coming.wait()
    return found


def _exchange_messages(group: Any, given: Sequence[tuple[int, Tensor]], taken: Sequence[tuple[int, Tensor]]) -> None:
    """Messages to and from other members, in one batch on the current CUDA stream."""
    group._start_coalescing()
    for to, value in given:
        group.send([value], to, 0)
    for source, value in taken:
        group.recv([value], source, 0)
    group._end_coalescing().wait()


def sum_rows(
    group: Any, rows: Tensor, spare: Tensor, into: Tensor | None, seats: Seats, hierarchical: bool = False
) -> Tensor:
    """The sum over the members of this member's row, in `into` (n) if that is given. `rows` (members, n) holds one row
    for each member; they and `spare` (n) are used up.

    In host memory, every member sends each other member its row, and adds up in the group's order what it receives. If
    the seats are a grid, `hierarchical` first adds up inside each host the rows of the members at this place on any
    host, and then the hosts' sums: a host's link carries (p - k) / p of the value in place of k times that.
    """
    if rows.is_cuda:
        total = spare if into is None else into
        group._reduce_scatter_base(total, rows.view(-1), dist.ReduceScatterOptions()).wait()
        return total
    mine = list(rows)
    if not (hierarchical and seats.hosts):
        return _sum_blocks(group, seats.index, range(len(mine)), mine, spare, into)[0]
    sums = []
    for host in seats.hosts:
        total, spare = _sum_blocks(group, seats.index, seats.here, [mine[seat] for seat in host], spare)
        sums.append(total)
    return _sum_blocks(group, seats.index, seats.seats_of_hosts, sums, spare, into)[0]


def _sum_blocks(
    group: Any, index: int, ring: Sequence[int], blocks: Sequence[Tensor], spare: Tensor, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of the blocks that the ring's members have for this member, where `blocks` are this member's own for all
    of them; and a block that is free again. A block that was sent is room for the next one received."""
    own, count, found = ring.index(index), len(ring), list(blocks)
    for turn in range(1, count):
        to, source = (own + turn) % count, (own - turn) % count
        coming = group.recv([spare], ring[source], 0)
        group.send([blocks[to]], ring[to], 0).wait()
        coming.wait()
        found[source], spare = spare, blocks[to]
    total = torch.add(found[0], found[1], out=spare if into is None else into)
    for block in found[2:]:
        total += block
    return total, found[0]
