"""Rows "paper, ours, verdict". A verdict is "agrees" if our number is in the paper's range, or within 15% of its single
number. A claim is judged once: where a number is shown in a second way beside it, the paper's is in brackets there."""

from __future__ import annotations

from dataclasses import dataclass

NEAR = 0.15  # of a single number of the paper
AGREES, DIFFERS, NO_CLAIM = "agrees", "differs", ""
INFINITE = float("inf")
AT_LEAST_ONE = (1.0, INFINITE)
SECONDS, TENTHS = "{:.2f} s / {:.2f} s", "{:.1f} s / {:.1f} s"

Claim = float | tuple[float, float] | None  # a number, a range whose bounds may be 0 or infinite, or no claim


@dataclass(frozen=True)
class FigureRow:
    """One number of a figure. `paper` is empty if the paper gives none; `value` is our number. `why`: the reason why it
    differs. `two_sided`: whether the paper says how large it is from above and from below. `fitted`: what of the
    machine was fitted to it, if anything was."""

    setting: str
    quantity: str
    paper: str
    ours: str
    verdict: str = NO_CLAIM
    value: float | None = None
    why: str = ""
    two_sided: bool = False
    fitted: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        verdict = f"{self.verdict} (fitted)" if self.fitted and self.verdict else self.verdict
        return self.setting, self.quantity, self.paper, self.ours, verdict


class FigureTable(list[FigureRow]):
    """The rows of a finding, and the methods that add them."""

    def add(
        self, setting: str, quantity: str, value: float | None, unit: str = "", digits: int = 2, claim: Claim = None,
        why: str = "", beside: bool = False,
    ) -> None:  # fmt: skip
        """Add our number beside the paper's. A `value` of None means "does not fit", whatever the paper claims. `why`:
        the reason if it differs. `beside`: the claim is judged in another row and only shown in this one."""
        if value is None:
            self.append(FigureRow(setting, quantity, "", "does not fit"))
            return
        paper, agrees = _judged(value, claim, unit)
        ours = f"{value:.{digits}f}{unit}"
        if agrees is None or beside:
            self.append(FigureRow(setting, quantity, f"({paper})" if paper else "", ours, value=value))
            return
        verdict, reason = (AGREES, "") if agrees else (DIFFERS, why)
        self.append(FigureRow(setting, quantity, paper, ours, verdict, value, reason, _two_sided(claim)))

    def words(self, setting: str, quantity: str, paper: str, ours: str, why: str = "") -> None:
        """Add words, which agree if they are the same; the paper's may be empty."""
        verdict = NO_CLAIM if not paper else AGREES if paper == ours else DIFFERS
        self.append(FigureRow(setting, quantity, paper, ours, verdict, why=why if verdict == DIFFERS else ""))

    def ratio(
        self, setting: str, quantity: str, over: float | None, under: float | None, claim: Claim = None,
        said: str = SECONDS, digits: int = 2, why: str = "", beside: bool = False,
    ) -> float | None:  # fmt: skip
        """Add `over / under`, with both numbers after the quantity in the format `said`; None means "does not fit"."""
        if over is None or under is None:
            self.add(setting, quantity, None)
            return None
        brackets = f" ({said.format(over, under)})" if said else ""
        self.add(setting, quantity + brackets, over / under, "x", digits, claim, why, beside)
        return over / under


def _two_sided(claim: Claim) -> bool:
    """Whether a claim bounds a positive number from both sides; 0 is no bound."""
    return not isinstance(claim, tuple) or (claim[0] > 0 and claim[1] < INFINITE)


def _judged(value: float, claim: Claim, unit: str) -> tuple[str, bool | None]:
    """The paper's claim as text, and whether a value agrees with it (None without a claim)."""
    if claim is None:
        return "", None
    if not isinstance(claim, tuple):
        return f"{claim:g}{unit}", abs(value / claim - 1) <= NEAR
    low, high = claim
    if high == INFINITE:
        paper = f"> {low:g}{unit}"
    elif low == -INFINITE:
        paper = f"< {high:g}{unit}"
    else:
        paper = f"{low:g} to {high:g}{unit}"
    return paper, low <= value <= high
