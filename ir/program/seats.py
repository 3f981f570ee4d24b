"""The members of a group by host, as hierarchical gathers and sums go through them (MiCS 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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

    @property
    def contiguous(self) -> bool:
        """Whether the members of each host are next to each other in the group's order."""
        return self.ring == tuple(range(len(self.ring)))


def seats_of(hosts: Sequence[int], index: int) -> Seats:
    """`hosts`: the host of each member of the group; `index`: this member's position."""
    names = list(dict.fromkeys(hosts))
    rows = tuple(tuple(i for i, host in enumerate(hosts) if host == name) for name in names)
    even = len(rows) > 1 and len({len(row) for row in rows}) == 1 and len(rows[0]) > 1
    return Seats(index, tuple(i for row in rows for i in row), rows if even else ())
