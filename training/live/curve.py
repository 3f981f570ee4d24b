"""A curve of any length in bounded memory."""

from __future__ import annotations

MOST_POINTS = 600


class Curve:
    """Points in the order of x. Once there are `MOST_POINTS`, two neighbours become one with the mean of their values,
    in the place of the first one."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._each = 1  # values that a point is the mean of
        self._open: list[tuple[float, float]] = []  # of the point that is not complete

    def add(self, x: float, y: float) -> None:
        self._open.append((x, y))
        if len(self._open) == self._each:
            self._points.append(_mean(self._open))
            self._open = []
        if len(self._points) == MOST_POINTS:
            self._points = [_mean(self._points[i : i + 2]) for i in range(0, MOST_POINTS, 2)]
            self._each *= 2

    def points(self) -> list[tuple[float, float]]:
        """The last point may be the mean of fewer values than the others."""
        return [*self._points, _mean(self._open)] if self._open else list(self._points)


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return points[0][0], sum(y for _, y in points) / len(points)
