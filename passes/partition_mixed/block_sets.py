"""Sums over sets of blocks, as arrays: a search asks for those of thousands of sets.

In: per block the values that it makes and reads, and the parameters and storages that it holds. Out: of any set of
blocks, the values that enter and leave it, and the bytes of what it holds, each parameter and each storage once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Integers = NDArray[np.int64]


class ItemRows:
    """The items of several owners, such as the values that each block reads, as one array beside the owner of each."""

    def __init__(self, rows: Iterable[Iterable[int]]):
        found = [list(row) for row in rows]
        self.owners = np.repeat(np.arange(len(found)), [len(row) for row in found])
        self.items = np.array(list(chain.from_iterable(found)), np.int64)

    def select(self, owners: Mask) -> Integers:
        """The items of the owners that a mask selects."""
        return self.items[owners[self.owners]]


class Holdings:
    """Things with sizes, or rows of sizes, that owners hold. `groups`: per owner the keys of its things; each group is
    one `ItemRows`."""

    def __init__(self, sizes: Mapping[int, int | tuple[int, ...]], *groups: Sequence[Iterable[int]]):
        numbers = {key: number for number, key in enumerate(sizes)}
        self.bytes = np.array(list(sizes.values()), np.int64)
        self.groups = [ItemRows([numbers[key] for key in row] for row in rows) for rows in groups]

    def mark(self, things: Integers) -> Mask:
        """A mask of these things."""
        found = np.zeros(len(self.bytes), bool)
        found[things] = True
        return found


class BlockValues:
    """The values that enter and leave sets of blocks. `makers`: of each value; `readers`: of each value; `read`: by
    each block."""

    def __init__(self, makers: Iterable[int], readers: Iterable[Sequence[int]], read: Sequence[Sequence[int]]):
        self.makers, self.readers, self.read = np.array([*makers], np.int64), ItemRows(readers), ItemRows(read)
        self.num_blocks, self.num_values = len(read), len(self.makers)
        self.num_readers = np.bincount(self.readers.owners, minlength=self.num_values)

    def mask(self, members: Sequence[int]) -> Mask:
        inside = np.zeros(self.num_blocks, bool)
        inside[members] = True
        return inside

    def crossing(self, inside: Mask) -> tuple[Mask, Mask]:
        """Masks of the values that enter the blocks, and of those made in them and read elsewhere."""
        count = np.bincount(self.read.select(inside), minlength=self.num_values)
        here = inside[self.makers]
        return (count > 0) & ~here, here & (count < self.num_readers)
