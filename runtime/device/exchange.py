"""Gathers and reduce-scatters on the rows of an existing buffer: each member gives one row, and every row arrives at
its final place.

In host memory, members pass rows to each other over gloo, point to point, because gloo's own collectives copy into
buffers that they allocate for every call. Between GPUs, NCCL does the work.

A hierarchical gather (MiCS 3.3) has three steps: each member gathers from the members at its own place on the other
hosts, all places at the same time, in a ring; the rows are put in order; then each host's members gather from each
other, for all hosts' rows in one batch, between GPUs by NCCL's own gather. Every row is received at its final place, so
that the second step moves nothing. A link between two hosts then carries (p - k) / p of the value in place of
(p - 1) / p, with k of p members on a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ...ir.program import Seats
from ..torch_names import gather_into, one_launch, sum_into


def gather_rows(group: Any, seats: Seats, rows: Tensor, hierarchical: bool, inside: Any = None) -> None:
    """Fill all of `rows` (members, n), of which only this member's own is filled so far. If the seats are no grid, a
    hierarchical gather is a plain one. `inside`: between GPUs, the communicator of this host's members, which gather
    the rows of all hosts in one launch, where those of a host are next to each other."""
    if not (hierarchical and seats.hosts):
        if rows.is_cuda:
            gather_into(group, rows.view(-1), rows[seats.index]).wait()
        else:
            _pass_round(group, seats.index, seats.ring, [[rows[seat]] for seat in seats.ring])
        return
    _pass_round(group, seats.index, seats.seats_of_hosts, [[rows[seat]] for seat in seats.seats_of_hosts])
    if rows.is_cuda and seats.contiguous:
        with one_launch(inside):
            for host, own in zip(seats.hosts, seats.seats_of_hosts):
                gather_into(inside, rows[host[0] : host[-1] + 1].view(-1), rows[own])
        return
    places = range(len(seats.here))
    _pass_round(group, seats.index, seats.here, [[rows[host[place]] for host in seats.hosts] for place in places])


def _pass_round(group: Any, index: int, ring: Sequence[int], blocks: Sequence[Sequence[Tensor]]) -> None:
    """Each member of the ring sends its block to the next, and from then on the block that it received last."""
    own, count = ring.index(index), len(ring)
    after, before = ring[(own + 1) % count], ring[(own - 1) % count]
    for turn in range(count - 1):
        _exchange(group, {after: blocks[(own - turn) % count]}, {before: blocks[(own - turn - 1) % count]})


def _exchange(group: Any, given: Mapping[int, Sequence[Tensor]], taken: Mapping[int, Sequence[Tensor]]) -> None:
    """Send tensors to members, by member, while those of others arrive; between GPUs in one launch on the current CUDA
    stream."""
    messages = [(group.recv, tensor, source, tag) for source, row in taken.items() for tag, tensor in enumerate(row)]
    messages += [(group.send, tensor, to, tag) for to, row in given.items() for tag, tensor in enumerate(row)]
    on_gpu = any(tensor.is_cuda for _, tensor, _, _ in messages)
    with one_launch(group) if on_gpu else nullcontext():
        works = [begin([tensor], peer, tag) for begin, tensor, peer, tag in messages]
    for work in () if on_gpu else works:
        work.wait()


def trade_rows(group: Any, index: int, rows: Tensor) -> Tensor:
    """The rows of each member for this one. `rows` (members, n, ...) has this member's rows for each."""
    found, once = torch.empty_like(rows), [1] * len(rows)
    trade_counted(group, index, rows, once, found, once)
    return found


def trade_counted(
    group: Any, index: int, rows: Tensor, given: Sequence[int], found: Tensor, taken: Sequence[int]
) -> None:
    """Fill `found` with what each member has for this one, the first member's rows first. `rows` (n, ...) has what this
    member has for each, in order; `given` and `taken` are the numbers of rows for and of each member, which both sides
    know: a message without rows is not sent."""
    mine, theirs = rows.split(list(given)), found.split(list(taken))
    theirs[index].copy_(mine[index])
    parts = [{o: [row] for o, row in enumerate(each) if o != index and len(row)} for each in (mine, theirs)]
    _exchange(group, *parts)


def pass_on(group: Any, index: int, count: int, value: Tensor, back: bool) -> Tensor:
    """The value of the member before this one, or after it; this member's own goes to the one on the other side."""
    before, after = (index - 1) % count, (index + 1) % count
    to, source = (before, after) if back else (after, before)
    found = torch.empty_like(value)
    _exchange(group, {to: [value]}, {source: [found]})
    return found


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
        sum_into(group, total, rows.view(-1)).wait()
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
        _exchange(group, {ring[to]: [blocks[to]]}, {ring[source]: [spare]})
        found[source], spare = spare, blocks[to]
    total = torch.add(found[0], found[1], out=spare if into is None else into)
    for block in found[2:]:
        total += block
    return total, found[0]
