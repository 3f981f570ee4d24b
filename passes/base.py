"""What every pass is, and what they hand on to each other.

A pass is a small frozen dataclass: `plan` reads a `Draft` and returns one decision (plain data, a field of the saved
plan), `rewrite` applies a decision to the draft. Contracts (`needs`, `gives`) are checked before anything runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..ir.errors import PassError
from .draft import Draft


@dataclass(frozen=True)
class Pass:
    """Base of all passes. `decides` is the field of the plan that holds the pass's decision; a pass that decides
    several things at once names them in `fields`, and its decision is a dict of them."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    decides: ClassVar[str]
    fields: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[bool] = False  # whether a job can do without its decision
    automatic: ClassVar[tuple[str, ...]] = ()  # numeric options that the pass can choose itself: 0, written "auto"
    synchronous: ClassVar[bool] = True  # False: the pass changes the training, so it must be asked for by name
    slow: ClassVar[bool] = False  # whether it takes longer than all others of its kind together
    closes: ClassVar[tuple[str, ...]] = ()  # passes that may not come after it, as they would change what it has made
    final: ClassVar[str] = ""  # of a pass with several decisions, why no other pass may make one of them

    def plan(self, draft: Draft) -> Any:
        raise NotImplementedError

    def rewrite(self, draft: Draft, decision: Any) -> None:
        raise NotImplementedError

    def check_pipeline(self, given: Collection[str]) -> None:
        """Raise `PassError` where this pass's options leave to another pass what no pass of the pipeline gives."""

    def split(self, decision: Any) -> dict[str, Any]:
        """The decision by field of the plan."""
        return {name: decision[name] for name in self.fields} if self.fields else {self.decides: decision}

    def gather(self, decided: Mapping[str, Any] | None) -> Any:
        """The decision out of a plan's fields; None where the plan has none."""
        names = self.fields or (self.decides,)
        if decided is None or any(decided.get(name) is None for name in names):
            return None
        return {name: decided[name] for name in names} if self.fields else decided[self.decides]


def require_own(p: Pass, field_name: str, decision: object, own: object) -> None:
    """Raise `PassError` where a plan's decision is one that another pass makes."""
    if decision != own:
        raise PassError(f"{field_name} is {decision!r}, but {p.name} makes {own!r} only; name the other's pass")


def check_contracts(passes: Sequence[Pass]) -> None:
    """Raise `PassError` where a pass needs what no earlier pass gives, leaves to another what none gives, or comes
    twice, or after one that it would change, or where two passes decide the same field."""
    given: set[str] = set()
    decided: dict[str, Pass] = {}
    seen: dict[str, Pass] = {}
    for p in passes:
        missing = [need for need in p.needs if need not in given]
        if missing:
            givers = [q.name for q in passes if set(missing) & set(q.gives)]
            hint = f"; put {', '.join(givers)} before it" if givers else ""
            raise PassError(f"pass {p.name!r} needs {', '.join(missing)}, which no pass before it gives{hint}")
        if p.name in seen:
            raise PassError(f"pass {p.name!r} comes twice")
        closing = next((other for other in seen.values() if p.name in other.closes), None)
        if closing is not None:
            raise PassError(
                f"pass {p.name!r} comes after {closing.name!r}, whose work it would change; put it before it"
            )
        for name in p.fields or (p.decides,):
            other = decided.setdefault(name, p)
            if other is not p:
                why = p.final or other.final
                raise PassError(
                    f"pass {p.name!r} decides {name}, as {other.name} does; leave one out{f': {why}' if why else ''}"
                )
        seen[p.name] = p
        given.update(p.gives)
    for p in passes:
        p.check_pipeline(given)
