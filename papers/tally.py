"""Counts the rows of a paper that agree, those to which something of the machine was fitted apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from .table import AGREES, NO_CLAIM, FigureRow


@dataclass(frozen=True)
class Tally:
    """Counts of rows. `two_sided`, of which `agreeing` agree, are those whose claim is a number or a range with two
    bounds, and to which nothing was fitted and which are no sizes of models: `fitted` and `sizes` count these."""

    claimed: int
    two_sided: int
    agreeing: int
    fitted: int
    sizes: int

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def said(self) -> str:
        share = f" ({self.agreeing / self.two_sided:.0%})" if self.two_sided else ""
        return f"{self.agreeing} of {self.two_sided} two-sided rows agree{share}"


def tally(rows: Iterable[FigureRow], sizes: bool = False) -> Tally:
    """`sizes`: whether the rows only say that the models have the paper's sizes, which no simulation decides."""
    claimed = [row for row in rows if row.verdict != NO_CLAIM]
    both = [row for row in claimed if row.two_sided]
    fitted = [row for row in both if row.fitted]
    if sizes:
        return Tally(len(claimed), 0, 0, len(fitted), len(both) - len(fitted))
    free = [row for row in both if not row.fitted]
    return Tally(len(claimed), len(free), sum(row.verdict == AGREES for row in free), len(fitted), 0)


def marked(key: str, rows: Sequence[FigureRow], fitted: Mapping[str, str]) -> list[FigureRow]:
    """The rows with what was fitted to them. `fitted` maps a finding's key, "key: setting", or "key: setting, quantity"
    to what was fitted."""
    found = []
    for row in rows:
        names = key, f"{key}: {row.setting}", f"{key}: {row.setting}, {row.quantity}"
        what = next((fitted[name] for name in names if name in fitted), "")
        found.append(replace(row, fitted=what) if what and row.verdict != NO_CLAIM else row)
    return found


def without_finding(fitted: Mapping[str, str], keys: Iterable[str]) -> list[str]:
    """The names in `fitted` that no finding has."""
    known = set(keys)
    return [name for name in fitted if name.partition(":")[0] not in known]
