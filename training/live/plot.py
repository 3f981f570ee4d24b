"""A curve as lines of braille, whose letters have two by four dots each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLANK = 0x2800  # the braille letter without dots
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the bit of each dot, by row and column


def braille(points: Sequence[tuple[float, float]], width: int, height: int) -> list[str]:
    """`height` lines of `width` letters, the highest value at the top. The points, in the order of x, reach from side
    to side; those that are not finite are left out."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    letters = [[BLANK] * width for _ in range(height)]
    if finite:
        low, high = bounds(finite)
        columns = _columns(finite, 2 * width)
        rows = [round((high - y) / ((high - low) or 1.0) * (4 * height - 1)) for y in columns]
        for column, row in enumerate(rows):
            before = rows[max(column - 1, 0)]
            # From beside the dot of the column before, so that steep parts are lines, too.
            start = row if before == row else before + (1 if row > before else -1)
            for dot in range(min(start, row), max(start, row) + 1):
                letters[dot // 4][column // 2] |= DOTS[dot % 4][column % 2]
    return ["".join(map(chr, line)) for line in letters]


def bounds(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The lowest and the highest finite value; zeros without one."""
    values = [y for _, y in points if math.isfinite(y)]
    return (min(values), max(values)) if values else (0.0, 0.0)


def _columns(points: Sequence[tuple[float, float]], count: int) -> list[float]:
    """A value for each column: the mean of its points, or one on the line between its neighbours."""
    first, last = points[0][0], points[-1][0]
    cells: list[list[float]] = [[] for _ in range(count)]
    for x, y in points:
        cells[round((x - first) / ((last - first) or 1.0) * (count - 1))].append(y)
    known = [(column, sum(cell) / len(cell)) for column, cell in enumerate(cells) if cell]
    found = [known[0][1]] * count  # a single point is a line
    for (left, low), (right, high) in pairwise(known):
        for column in range(left, right + 1):
            found[column] = low + (high - low) * (column - left) / (right - left)
    return found
