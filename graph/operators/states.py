"""States: how the elements of a tensor relate to the rows of a batch. `follow/engine.py` finds the state of each value.

A micro-batch has R rows. A dimension carries them if it can be seen as (outer, R, inner): its element i is about row
`i // inner % R`. Reshaping and permuting keep that form, so that a value stays a value of rows through every layer.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

Stretch = tuple[
    int, int, int
]  # (dim, low, high): what changes with `i % high // low` for the place i along a dimension
ENDLESS = 1 << 62


@dataclass(frozen=True)
class Scale:
    """The growth of a value with the number of rows by which it was multiplied: `power` 1 for a factor of R, -1 for
    1 / R. `unsure`: it was multiplied by a plain number, and one trace does not tell whether that is the number of
    rows."""

    power: int = 0
    unsure: bool = False

    def times(self, other: Scale) -> Scale:
        return Scale(self.power + other.power, self.unsure or other.unsure)

    def divide_by(self, other: Scale) -> Scale:
        return Scale(self.power - other.power, self.unsure or other.unsure)


ONE = Scale()
ANY_STEP = -1  # of positions in whichever values of rows they index


@dataclass(frozen=True)
class RowState:
    """Base of the states of a value."""

    scale: Scale = ONE


@dataclass(frozen=True)
class Free(RowState):
    """No row has any influence: parameters, buffers, constants. Values differ along `varies`. `counts`: (dim, step) of
    row numbers, the multiples of `step` along a dimension."""

    varies: frozenset[Stretch] = frozenset()
    counts: tuple[int, int] | None = None
    is_zero: bool = False


@dataclass(frozen=True)
class ByRow(RowState):
    """Each element depends on one row: that of its place along `dim`. `order` is not None where the places are permuted
    and names the permutation. `step`: the values are positions that count `step` elements for each row, or
    `ANY_STEP`."""

    dim: int = 0
    inner: int = 1
    order: int | None = None
    step: int = 0


@dataclass(frozen=True)
class OneRow(RowState):
    """All elements depend on the row of this number, and on no other. `part`: where the elements begin in the row, and
    their number, of what was just taken from a value of rows."""

    number: int = 0
    part: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Permutation(RowState):
    """A permutation of all places along dimension `dim` of a value of rows, divided by `share`. `is_inverse`: the one
    that undoes the permutation `order`."""

    dim: int = 0
    inner: int = 1
    order: int = 0
    share: int = 1
    is_inverse: bool = False


@dataclass(frozen=True)
class OverRows(RowState):
    """A sum over all rows times R ** (power - 1): with power 1 a plain sum, with power 0 an average."""


@dataclass(frozen=True)
class Mixed(RowState):
    """Elements depend on several rows in some other way."""


def gradient_state(state: RowState) -> RowState:
    """The state of the gradient of a value. Backward of a micro-batch begins with its share of the mean over the whole
    batch, which grows with its rows: a row has the gradient that it has in the whole batch."""
    scale = Scale(power=1).divide_by(state.scale)
    if isinstance(state, Free):
        return OverRows(scale=scale)
    if isinstance(state, OverRows):
        return Free(scale=scale)
    if isinstance(state, ByRow):
        return replace(state, scale=ONE.divide_by(state.scale), step=0)
    return replace(state, scale=ONE.divide_by(state.scale)) if isinstance(state, OneRow) else Mixed()


class Kind(enum.Enum):
    """In what way rows meet; `graph/follow/coupling.py` has the words for each."""

    BATCH_NORM = "batch-norm"  # statistics of all rows, in training mode
    PAIRS = "pairs"  # each row with each other
    ACROSS = "across"  # along the dimension of rows, such as a softmax
    REORDERED = "reordered"  # other rows in a row's place
    REUSED = "reused"  # what all rows give together, for each of them
    NONLINEAR = "nonlinear"  # a sum over rows in something that is not linear
    RATIO = "ratio"  # a sum over rows divided by another one
    COUNT = "count"  # a mean over what a micro-batch alone counts
    UNEVEN = "uneven"  # a sum over rows added to what is none
    ROW_NUMBER = "row-number"
    GRADIENT = "gradient"  # in backward alone
    BUFFER = "buffer"  # a buffer that each micro-batch updates
    ROW_COUNT = "row-count"
    NO_RECORD = "no-record"  # an operator of which nothing is known
    UNKNOWN = "unknown"  # an operator without a rule


def whole(dims: Iterable[int]) -> frozenset[Stretch]:
    """Whole dimensions, as `Free.varies`."""
    return frozenset((dim, 1, ENDLESS) for dim in dims)


def differs(free: Free, dim: int, inner: int, rows: int) -> bool:
    """Whether a constant differs from row to row, beside a value whose rows are along this dimension."""
    return any(d == dim and low < inner * rows and high > inner for d, low, high in free.varies)


def place(shape: Sequence[int], flat_inner: int, rows: int) -> tuple[int, int] | None:
    """The dimension that carries the rows, and its inner size, in a contiguous value of this shape in which a row's
    next element group begins `flat_inner` elements further; None if no single dimension does."""
    below, found = 1, []
    for dim in reversed(range(len(shape))):
        inner, left = divmod(flat_inner, below)
        if inner and not left and shape[dim] % (inner * rows) == 0:
            found.append((dim, inner))
        below *= shape[dim]
    exact = [at for at in found if shape[at[0]] == rows]
    return min(exact or found, default=None)


def flat_inner(shape: Sequence[int], dim: int, inner: int) -> int:
    """The argument of that name of `place`, for a dimension that carries the rows."""
    return math.prod(shape[dim + 1 :]) * inner
