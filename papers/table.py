"""The rows of a finding, and the methods that add them. `papers/rule.py` judges each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .rule import AGREES, DERIVED, DIFFERS, INFINITE, Changed, Claim, FigureRow, agrees, kind_of, moves

AT_LEAST_ONE = (1.0, INFINITE)
SECONDS, TENTHS = "{:.2f} s / {:.2f} s", "{:.1f} s / {:.1f} s"
Checks = Mapping[str, Callable[[], float | str | None]]  # what is changed -> the row's number then; made if it differs
RangeChecks = Mapping[str, Callable[[], Sequence[float]]]  # the same for the numbers of all settings


ELSEWHERE = "elsewhere"  # of a claim that another row is judged by


class FigureTable(list[FigureRow]):
    """The rows of a finding."""

    def add(
        self, setting: str, quantity: str, value: float | None, unit: str = "", digits: int = 2, claim: Claim = None,
        why: str = "", apart: str = "", checks: Checks | None = None,
    ) -> None:  # fmt: skip
        """Add our number beside the paper's. A `value` of None means "does not fit", whatever the paper claims. `why`
        and `checks`: the reason if it differs. `apart`: why the row does not count: `ELSEWHERE`, for a claim that is
        judged in another row and only shown in this one; else the text says from what the row follows."""
        if value is None:
            self.append(FigureRow(setting, quantity, "", "does not fit"))
            return
        paper, ours = _said(claim, unit), f"{value:.{digits}f}{unit}"
        if claim is None or apart == ELSEWHERE:
            self.append(FigureRow(setting, quantity, f"({paper})" if paper else "", ours, value=value))
            return
        figure = float(claim) if isinstance(claim, int | float) else None
        row = FigureRow(setting, quantity, paper, ours, value=value, figure=figure, why=why, follows=apart)
        self._judge(row, value, claim, checks, f"{{:.{digits}f}}{unit}")

    def words(
        self, setting: str, quantity: str, paper: str, ours: str, why: str = "", checks: Checks | None = None
    ) -> None:
        """Add words, which agree if they are the same; the paper's may be empty."""
        row = FigureRow(setting, quantity, paper, ours, why=why if paper else "")
        if paper:
            self._judge(row, ours, paper, checks)
        else:
            self.append(row)

    def ratio(
        self, setting: str, quantity: str, over: float | None, under: float | None, claim: Claim = None,
        said: str = SECONDS, why: str = "", apart: str = "", checks: Checks | None = None,
    ) -> float | None:  # fmt: skip
        """Add `over / under`, with both numbers after the quantity in the format `said`; None means "does not fit"."""
        if over is None or under is None:
            self.add(setting, quantity, None)
            return None
        brackets = f" ({said.format(over, under)})" if said else ""
        self.add(setting, quantity + brackets, over / under, "x", 2, claim, why, apart, checks)
        return over / under

    def ends(
        self, setting: str, quantity: str, values: Sequence[float], claims: tuple[float, float], unit: str = "",
        digits: int = 2, why: str = "", checks: RangeChecks | None = None,
    ) -> None:  # fmt: skip
        """Add the paper's range over several settings as its two numbers, the lowest and the highest."""
        if not values:
            self.add(setting, quantity, None)
            return
        for name, end, claim in (("lowest", min, claims[0]), ("highest", max, claims[1])):
            own = {change: _end_of(end, make) for change, make in (checks or {}).items()}
            self.add(setting, f"{quantity}, {name}", end(values), unit, digits, claim, why, checks=own)

    def _judge(self, row: FigureRow, value: float | str, claim: Claim, checks: Checks | None, form: str = "{}") -> None:
        """Add a row with its kind and verdict and, if it differs, its reason with our number after each change."""
        agreed, found = agrees(value, claim), []
        for change, make in (checks or {}).items() if not agreed else ():
            after = make()
            said = "does not fit" if after is None else form.format(after)
            found.append(Changed(change, said, after is not None and moves(value, after, claim)))
        kind, why = DERIVED if row.follows else kind_of(claim), "" if agreed else row.why
        verdict = AGREES if agreed else DIFFERS
        self.append(replace(row, kind=kind, verdict=verdict, why=why, checks=tuple(found)))


def _end_of(end: Callable[[Sequence[float]], float], make: Callable[[], Sequence[float]]) -> Callable[[], float | None]:
    def found() -> float | None:
        values = make()
        return end(values) if values else None

    return found


def _said(claim: Claim, unit: str) -> str:
    """The paper's claim as text."""
    if claim is None or isinstance(claim, str):
        return claim or ""
    if not isinstance(claim, tuple):
        return f"{claim:g}{unit}"
    low, high = claim
    if high == INFINITE:
        return f"> {low:g}{unit}"
    return f"{low:g} to {high:g}{unit}" if low > 0 else f"up to {high:g}{unit}"
