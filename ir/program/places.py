"""Places in one block of memory, for values that come and go in a known order.

Each value gets the lowest place that is free and large enough (first fit). Where that leaves gaps, values are placed at
the two ends of the block in turn, if this takes less: while weights come for one stage at one end, those of the stage
before it are in use at the other, and what leaves makes room for the next but one, however unlike their sizes are.
Where neither will do, as where sums of gradients come one by one between weights and stay, the largest values come
first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Hashable
from functools import cached_property
from typing import NamedTuple

MOST_MEETINGS = 1 << 18  # pairs of values that are there together, beyond which placing the largest first takes long


class Coming(NamedTuple):
    """A value comes. `beside`: the value that comes before it to the same user, whose end of the block it shares."""

    key: Hashable
    num_bytes: int
    beside: Hashable | None


class ArenaOffsets(NamedTuple):
    """The offset of each value, and what the block must hold."""

    offsets: dict[Hashable, int]
    bytes: int


class ArenaPlaces:
    """Values in the order in which they come and go; places for all of them once this is known."""

    def __init__(self, alignment: int):
        self.alignment = alignment
        self._events: list[Coming | Hashable] = []

    def take(self, key: Hashable, num_bytes: int, beside: Hashable | None = None) -> None:
        """A value comes; its key is its own. `beside`: see `Coming`."""
        self._events.append(Coming(key, -(-num_bytes // self.alignment) * self.alignment, beside))

    def give(self, key: Hashable) -> None:
        """A value goes; nothing happens if none of that key is there."""
        self._events.append(key)

    @property
    def bytes(self) -> int:
        """The bytes that the block must hold."""
        return self.offsets.bytes

    @cached_property
    def offsets(self) -> ArenaOffsets:
        """The places; no value comes or goes after they were asked for."""
        lowest, least_bytes = self._lowest()
        if lowest.bytes == least_bytes:
            return lowest
        found = self._from_both_ends(least_bytes) or self._largest_first()
        return lowest if found is None or found.bytes >= lowest.bytes else found

    def _lowest(self) -> tuple[ArenaOffsets, int]:
        """Places by first fit; and the bytes of all values that are there at once, at most."""
        room, offsets = FreeRoom(math.inf), dict[Hashable, int]()
        live: dict[Hashable, int] = {}
        now = most = size = 0
        for event in self._events:
            if isinstance(event, Coming):
                offset = room.take(event.key, event.num_bytes)
                assert offset is not None, "an endless block has room"
                offsets[event.key], live[event.key] = offset, event.num_bytes
                now += event.num_bytes
                most, size = max(most, now), max(size, offset + event.num_bytes)
            else:
                room.give(event)
                now -= live.pop(event, 0)
        return ArenaOffsets(offsets, size), most

    def _from_both_ends(self, num_bytes: int) -> ArenaOffsets | None:
        """Places at both ends of a block in turn; None if this block is too small for that."""
        room, offsets = FreeRoom(num_bytes), dict[Hashable, int]()
        top = True
        at_top: dict[Hashable, bool] = {}
        for event in self._events:
            if not isinstance(event, Coming):
                room.give(event)
                continue
            top = at_top[event.key] = at_top.get(event.beside, not top)
            offset = room.take(event.key, event.num_bytes, top)
            if offset is None:
                return None
            offsets[event.key] = offset
        return ArenaOffsets(offsets, num_bytes)

    def _largest_first(self) -> ArenaOffsets | None:
        """Lowest places, the largest value placed first; None where too many values are there together."""
        sizes, meets, num_meetings = dict[Hashable, int](), dict[Hashable, list[Hashable]](), 0
        live: set[Hashable] = set()
        for event in self._events:
            if not isinstance(event, Coming):
                live.discard(event)
                continue
            num_meetings += len(live)
            if num_meetings > MOST_MEETINGS:
                return None
            sizes[event.key], meets[event.key] = event.num_bytes, [*live]
            for other in live:
                meets[other].append(event.key)
            live.add(event.key)
        offsets: dict[Hashable, int] = {}
        for key in sorted(sizes, key=lambda key: -sizes[key]):
            offset = 0
            for start, end in sorted((offsets[o], offsets[o] + sizes[o]) for o in meets[key] if o in offsets):
                if start - offset >= sizes[key]:
                    break
                offset = max(offset, end)
            offsets[key] = offset
        return ArenaOffsets(offsets, max((offset + sizes[key] for key, offset in offsets.items()), default=0))


class FreeRoom:
    """The free room of one block."""

    def __init__(self, num_bytes: float):
        self._gaps: list[tuple[int, float]] = [(0, num_bytes)]  # (offset, end) of what is free, sorted; no two touch
        self._place_of: dict[Hashable, tuple[int, int]] = {}

    def take(self, key: Hashable, num_bytes: int, top: bool = False) -> int | None:
        """The lowest offset, or the highest, at which there is room for a value; None if there is none."""
        if not num_bytes:
            return 0
        gaps = self._gaps
        for i in reversed(range(len(gaps))) if top else range(len(gaps)):
            start, end = gaps[i]
            if end - start < num_bytes:
                continue
            offset = int(end) - num_bytes if top else start
            rest = (start, offset) if top else (offset + num_bytes, end)
            gaps[i : i + 1] = [rest] if rest[1] > rest[0] else []
            self._place_of[key] = (offset, offset + num_bytes)
            return offset
        return None

    def give(self, key: Hashable) -> None:
        """Give a value's place back; does nothing if it has none."""
        start, free_end = self._place_of.pop(key, (0, 0))
        if start == free_end:
            return
        gaps, at = self._gaps, bisect_left(self._gaps, (start, free_end))
        upto, end = at, float(free_end)
        if at < len(gaps) and gaps[at][0] == free_end:
            end, upto = gaps[at][1], at + 1
        if at and gaps[at - 1][1] == start:
            at, start = at - 1, gaps[at - 1][0]
        gaps[at:upto] = [(start, end)]
