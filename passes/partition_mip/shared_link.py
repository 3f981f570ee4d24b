"""Transfers through one root complex in one direction, shared evenly by the devices that move something."""

from __future__ import annotations

import math
from collections import deque


class SharedLink:
    """Each device's transfers follow one another; those of different devices get equal parts of the link.

    Time passes only as far as `end_s` is asked: what begins later may be added afterwards.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.queues: dict[int, deque[list[float]]] = {}  # per device, rows of the second of begin, seconds left, name
        self.ended: dict[int, float] = {}

    def add(self, device: int, name: int, begin_s: float, work_s: float) -> None:
        """A transfer that takes `work_s` seconds alone, and begins when it may and those before it have ended."""
        self.queues.setdefault(device, deque()).append([begin_s, work_s, name])

    def end_s(self, name: int) -> float:
        """The seconds at which this transfer ends."""
        ended = self.ended
        while name not in ended:
            now_s, later_s, least_s = self.now_s, math.inf, math.inf
            moving = []
            for queue in self.queues.values():
                if not queue:
                    continue
                row = queue[0]
                if row[0] > now_s:
                    if row[0] < later_s:
                        later_s = row[0]
                else:
                    moving.append(row)
                    if row[1] < least_s:
                        least_s, first = row[1], queue
            if not moving:
                self.now_s = later_s
                continue
            whole_s = least_s * len(moving)
            if now_s + whole_s <= later_s:
                self.now_s = now_s + whole_s
                ended[int(first.popleft()[2])] = self.now_s
            else:
                least_s, self.now_s = (later_s - now_s) / len(moving), later_s
            for row in moving:
                row[1] -= least_s
        return ended[name]
