"""The rule by which a row of a paper's page is judged, and the counts of rows that it gives.

What a row is decides whether it counts:

- measured: the paper prints this number. Ours agrees within 15% of it, from above and from below, in the paper's own
  unit. Only these rows are counted.
- order: which of two is larger, what fits, a bound on one side, words. The row has a verdict and is not counted.
- fitted: something of a machine was fitted to the row, or to the claim that it belongs to.
- derived: the row is true by construction, or follows from the paper's other numbers.

A claim is judged in one row; where its number is shown again it is in brackets. A range over several settings is two
numbers of the paper: the least of ours is judged by its low end, the most of ours by its high end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

NEAR = 0.15  # of a number of the paper
AGREES, DIFFERS, NO_CLAIM = "agrees", "differs", ""
MEASURED, ORDER, FITTED, DERIVED = "measured", "order", "fitted", "derived"
INFINITE = float("inf")
NEARER = 0.1  # of the way from our number to the paper's, by which a checked reason moves it at least
EQUAL = 1e-7  # a relative difference below which two quotients are the same by construction

Claim = float | tuple[float, float] | str | None  # a number, bounds of which one is 0 or infinite, words, or no claim


@dataclass(frozen=True)
class Changed:
    """A row's number after one change. `moves`: whether that brings it nearer to the paper's."""

    changed: str
    ours: str
    moves: bool


@dataclass(frozen=True)
class FigureRow:
    """One number of a figure. `paper` is empty if the paper gives none; `value` is our number, `figure` the paper's.
    `why`: the reason why it differs, and `checks` are the same row after changes of what the reason names. `follows`:
    what of the machine was fitted to it, or from what it follows."""

    setting: str
    quantity: str
    paper: str
    ours: str
    kind: str = NO_CLAIM
    verdict: str = NO_CLAIM
    value: float | None = None
    figure: float | None = None
    why: str = ""
    checks: Sequence[Changed] = ()
    follows: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str, str, str]:
        return self.setting, self.quantity, self.paper, self.ours, self.kind, self.verdict

    @property
    def is_checked(self) -> bool:
        return any(check.moves for check in self.checks)


def kind_of(claim: Claim) -> str:
    """The kind of a row with this claim, to which nothing was fitted. Raises `ValueError` for two bounds, which no
    single row has."""
    if claim is None:
        return NO_CLAIM
    if isinstance(claim, tuple) and claim[0] > 0 and claim[1] < INFINITE:
        raise ValueError(f"a claim of two bounds, {claim[0]:g} and {claim[1]:g}: judge its ends as two numbers")
    return MEASURED if isinstance(claim, int | float) else ORDER


def agrees(ours: float | str, claim: Claim) -> bool:
    if isinstance(claim, tuple):
        return not isinstance(ours, str) and claim[0] <= ours <= claim[1]
    if isinstance(claim, str) or isinstance(ours, str) or claim is None:
        return ours == claim
    return abs(ours / claim - 1) <= NEAR


def moves(before: float | str, after: float | str, claim: Claim) -> bool:
    """Whether a change brings a number nearer to the claim, by a tenth of the way at least."""
    if isinstance(before, str) or isinstance(after, str) or isinstance(claim, str):
        return after != before and (after == claim or isinstance(after, str))
    if isinstance(claim, tuple):
        claim = claim[0] if before < claim[0] else claim[1]
    return claim is not None and abs(after - claim) <= (1 - NEARER) * abs(before - claim)


def multiples(rows: Iterable[FigureRow]) -> Iterator[str]:
    """The measured rows that cannot have been simulated: whose number is the paper's own to the last digit, or another
    row's times a constant, so that both have the same quotient of ours and the paper's."""
    quotients = [
        (f"{row.setting}, {row.quantity}", row.value / row.figure)
        for row in rows if row.kind == MEASURED and row.value and row.figure
    ]  # fmt: skip
    yield from (f"{name} is the paper's own number" for name, one in quotients if abs(one - 1) < EQUAL)
    for (name, one), (other, two) in combinations(quotients, 2):
        if abs(one / two - 1) < EQUAL:
            yield f"{other} is {name} times a constant"


def marked(key: str, rows: Sequence[FigureRow], fitted: Mapping[str, str]) -> list[FigureRow]:
    """The rows with what was fitted to them. `fitted` maps a finding's key, "key: setting", or "key: setting, quantity"
    to what was fitted."""
    found = []
    for row in rows:
        names = key, f"{key}: {row.setting}", f"{key}: {row.setting}, {row.quantity}"
        what = next((fitted[name] for name in names if name in fitted), "")
        found.append(replace(row, kind=FITTED, follows=what) if what and row.kind == MEASURED else row)
    return found


def without_finding(fitted: Mapping[str, str], keys: Iterable[str]) -> list[str]:
    """The names in `fitted` that no finding has."""
    known = set(keys)
    return [name for name in fitted if name.partition(":")[0] not in known]


@dataclass(frozen=True)
class Tally:
    """Counts of rows: the measured ones, of which `agreeing` agree and `checked` differ with a reason that was checked;
    those of order, of which `in_order` agree; and those that do not count."""

    measured: int = 0
    agreeing: int = 0
    checked: int = 0
    ordered: int = 0
    in_order: int = 0
    fitted: int = 0
    derived: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def share(self) -> str:
        return f"{self.agreeing / self.measured:.0%}" if self.measured else ""

    @property
    def said(self) -> str:
        share = f" ({self.share})" if self.share else ""
        return f"{self.agreeing} of {self.measured} numbers that the papers print agree{share}"


def tally(rows: Iterable[FigureRow]) -> Tally:
    found = list(rows)
    measured, ordered, *others = (
        [row for row in found if row.kind == kind] for kind in (MEASURED, ORDER, FITTED, DERIVED)
    )
    agreeing, in_order = (sum(row.verdict == AGREES for row in rows) for rows in (measured, ordered))
    checked = sum(row.verdict == DIFFERS and row.is_checked for row in measured)
    return Tally(len(measured), agreeing, checked, len(ordered), in_order, *map(len, others))
