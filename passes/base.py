"""The base of all passes, and the contracts between them.

A pass is a small frozen dataclass: `plan` reads a `Draft` and returns one decision (plain data, a field of the saved
plan), `rewrite` applies a decision to the draft. Contracts (`needs`, `gives`, `precedes`, `closes`) state every order
that a pass needs, and are checked before anything runs.

A pass also declares what the rest of the compiler must know of it: the fields of the plan that it decides, its words in
the name of a candidate and in `explain`, and the variants of itself that the search should try. `table.py` finds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..ir.errors import PassError
from ..ir.program import Program
from .decisions import Decision
from .draft import Draft

P = TypeVar("P", bound="Pass")


class Explanation(NamedTuple):
    """Lines of `explain` about a pass's decision. They follow the plan's stages, or form a section with a `heading`."""

    lines: Sequence[str] = ()
    heading: str = ""


@dataclass(frozen=True)
class PlanSoFar:
    """The best plan that the search has, for passes that propose variants of themselves. `passes`: its pipeline, or the
    plainest one where nothing fits yet. `start`: a draft before the first pass. The other fields describe the plan only
    if it has the number of micro-batches for which variants are wanted: `end`: its draft after the last pass;
    `decisions`; `is_short`: whether devices lack the memory to keep all weights and saved tensors; `is_shared`: whether
    lanes share its stages."""

    passes: tuple[Pass, ...]
    start: Draft
    end: Draft | None = None
    decisions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    is_short: bool = False
    is_shared: bool = False

    def find(self, kind: type[P]) -> P | None:
        """The pipeline's pass of this kind."""
        return next((p for p in self.passes if isinstance(p, kind)), None)


@dataclass(frozen=True)
class Pass:
    """Base of all passes. `decides`: the fields of the plan that hold the pass's decision. The decision of a pass that
    decides several fields is a dict of their values. Passes that decide the same first field replace each other."""

    name: ClassVar[str]
    rank: ClassVar[int] = 99  # its place in tables, in saved plans and among the search's tries; equal ranks by name
    needs: ClassVar[tuple[str, ...]] = ()
    gives: ClassVar[tuple[str, ...]] = ()
    decides: ClassVar[tuple[Decision, ...]]
    word: ClassVar[str] = ""  # its decision, where each of the passes that can decide a field has one word for it
    everywhere: ClassVar[bool] = False  # whether every strategy has it, as it does nothing where nothing can be gained
    automatic: ClassVar[tuple[str, ...]] = ()  # numeric options that the pass can choose itself: 0, written "auto"
    label_rank: ClassVar[int] = 0  # the place of its words in a candidate's name; equal ranks as in the pipeline
    absent: ClassVar[str] = ""  # the words for a candidate without this pass, which others have
    of_leaders: ClassVar[bool] = False  # whether the search gives its variants to other fast partitions, too
    synchronous: ClassVar[bool] = True  # False: the pass changes the training, so it must be asked for by name
    slow: ClassVar[bool] = False  # whether it takes longer than all others of its kind together
    precedes: ClassVar[tuple[str, ...]] = ()  # what passes give, for what it changes: it may not come after them
    closes: ClassVar[tuple[str, ...]] = ()  # passes that may not come after it, as they would change what it has made
    final: ClassVar[str] = ""  # of a pass with several decisions, why no other pass may make one of them

    def plan(self, draft: Draft) -> Any:
        raise NotImplementedError

    def rewrite(self, draft: Draft, decision: Any) -> None:
        raise NotImplementedError

    def check_pipeline(self, given: Collection[str]) -> None:
        """Raise `PassError` where this pass's options leave to another pass what no pass of the pipeline gives."""

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """The names of the fields of the plan that it decides."""
        return tuple(decision.name for decision in cls.decides)

    def split(self, decision: Any) -> dict[str, Any]:
        """The decision by field of the plan."""
        names = self.fields()
        return {name: decision[name] for name in names} if len(names) > 1 else {names[0]: decision}

    def gather(self, decided: Mapping[str, Any] | None) -> Any:
        """The decision out of a plan's fields; None where the plan has none."""
        names = self.fields()
        if decided is None or any(decided.get(name) is None for name in names):
            return None
        return {name: decided[name] for name in names} if len(names) > 1 else decided[names[0]]

    def text(self, short: bool = False) -> str:
        """Its name, with the options that differ from their defaults. `short`: floats have six digits at most."""
        values = [(field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self)]
        changed = [(name, value) for name, value, default in values if value != default]
        options = ", ".join(f"{name}={_option_text(value, short)}" for name, value in changed)
        return f"{self.name}{{{options}}}" if options else self.name

    def label(self, passes: Sequence[Pass]) -> Sequence[str]:
        """Its words in the name of a candidate with these passes; none for what is usual."""
        return [self.text(short=True)]

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        """The forms that the search should try in this pass's place, or in addition; None: the best plan without it.
        A pass over the op graph comes after the others of its kind, any other pass at the end."""
        return ()

    @classmethod
    def explain(cls, decisions: Any, programs: Sequence[Program]) -> Explanation:
        """The lines of `explain` on a plan's `decisions`; none where the plan does not have this pass."""
        return Explanation()


def _option_text(value: Any, short: bool) -> str:
    return f"{value:g}" if short and isinstance(value, float) else str(value).lower()


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
        late = next((other for other in seen.values() if set(p.precedes) & set(other.gives)), None)
        if late is not None:
            raise PassError(f"pass {p.name!r} comes after {late.name!r}, which reads what it changes; put it before it")
        closing = next((other for other in seen.values() if p.name in other.closes), None)
        if closing is not None:
            raise PassError(
                f"pass {p.name!r} comes after {closing.name!r}, whose work it would change; put it before it"
            )
        for name in p.fields():
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
