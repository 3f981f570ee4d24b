"""The rows of a finding, and the methods that add them. `papers/rule.py` judges each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .rule import AGREES, DERIVED, DIFFERS, INFINITE, Check, Claim, FigureRow, agrees, kind_of, moves

AT_LEAST_ONE = (1.0, INFINITE)
SECONDS, TENTHS = "{:.2f} s / {:.2f} s", "{:.1f} s / {:.1f} s"
Checks = Mapping[str, Callable[[], float | str | None]]  # what is changed -> the row's number then; made if it differs
RangeChecks = Mapping[str, Callable[[], Sequence[float]]]  # the same for the numbers of all settings


class FigureTable(list[FigureRow]):
    """The rows of a finding."""

    def add(
        self, setting: str, quantity: str, value: float | None, unit: str = "", digits: int = 2, claim: Claim = None,
        why: str = "", beside: bool = False, follows: str = "", checks: Checks | None = None,
    ) -> None:  # fmt: skip
        """Add our number beside the paper's. A `value` of None means "does not fit", whatever the paper claims. `why`
        and `checks`: the reason if it differs. `beside`: the claim is judged in another row and only shown in this one.
        `follows`: from what the row follows, so that it does not count."""
        if value is None:
            self.append(FigureRow(setting, quantity, "", "does not fit"))
            return
        paper, ours = _said(claim, unit), f"{value:.{digits}f}{unit}"
        if claim is None or beside:
            self.append(FigureRow(setting, quantity, f"({paper})" if paper else "", ours, value=value))
            return
        self._judge(setting, quantity, paper, ours, value, claim, why, checks, follows, unit, digits)

    def words(
        self, setting: str, quantity: str, paper: str, ours: str, why: str = "", checks: Checks | None = None
    ) -> None:
        """Add words, which agree if they are the same; the paper's may be empty."""
        if paper:
            self._judge(setting, quantity, paper, ours, ours, paper, why, checks)
        else:
            self.append(FigureRow(setting, quantity, "", ours))

    def ratio(
        self, setting: str, quantity: str, over: float | None, under: float | None, claim: Claim = None,
        said: str = SECONDS, digits: int = 2, why: str = "", beside: bool = False, follows: str = "",
        checks: Checks | None = None,
    ) -> float | None:  # fmt: skip
        """Add `over / under`, with both numbers after the quantity in the format `said`; None means "does not fit"."""
        if over is None or under is None:
            self.add(setting, quantity, None)
            return None
        brackets = f" ({said.format(over, under)})" if said else ""
        self.add(setting, quantity + brackets, over / under, "x", digits, claim, why, beside, follows, checks)
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

    def _judge(
        self, setting: str, quantity: str, paper: str, ours: str, value: float | str, claim: Claim, why: str,
        checks: Checks | None, follows: str = "", unit: str = "", digits: int = 2,
    ) -> None:  # fmt: skip
        agreed = agrees(value, claim)
        found = []
        for change, make in (checks or {}).items() if not agreed else ():
            after = make()
            said = "does not fit" if after is None else after if isinstance(after, str) else f"{after:.{digits}f}{unit}"
            found.append(Check(change, said, after is not None and moves(value, after, claim)))
        number = None if isinstance(value, str) else value
        figure = float(claim) if isinstance(claim, int | float) else None
        self.append(
            FigureRow(
                setting, quantity, paper, ours, DERIVED if follows else kind_of(claim), AGREES if agreed else DIFFERS,
                number, figure, "" if agreed else why, tuple(found), follows,
            )
        )  # fmt: skip


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
