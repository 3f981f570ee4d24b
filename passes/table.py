"""All passes by name, in the order of their ranks, and the fields of a plan that they decide.

Other distributions add passes by entry points of `penstock.passes`, and schedules by those of `penstock.schedules`.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeGuard

from ..ir.errors import ExtensionError
from ..ir.extensions import entries
from .base import Pass
from .decisions import Decision
from .schedule.schedule import Schedule

ROOM = Path(__file__).parent


def _built_in() -> Iterator[type[Pass]]:
    """The passes that the files of this room's folders define."""
    for folder in pkgutil.iter_modules([str(ROOM)]):
        if not folder.ispkg:
            continue
        for file in pkgutil.iter_modules([str(ROOM / folder.name)]):
            if not file.ispkg:
                module = importlib.import_module(f"..{folder.name}.{file.name}", __name__)
                yield from (
                    kind for kind in vars(module).values() if _is_pass(kind) and kind.__module__ == module.__name__
                )


def _is_pass(value: object) -> TypeGuard[type[Pass]]:
    """Whether a value is the class of a pass, and not the base of several."""
    return isinstance(value, type) and issubclass(value, Pass) and "name" in vars(value)


def _extensions(own: Collection[str]) -> Iterator[type[Pass]]:
    """The passes of other distributions. Raises `ExtensionError` for what is no pass, or no schedule."""
    names = set(own)
    for group, base in (("penstock.passes", Pass), ("penstock.schedules", Schedule)):
        for name, kind in entries(group, names.__contains__).items():
            if not _is_pass(kind) or not issubclass(kind, base) or kind.name != name:
                raise ExtensionError(
                    f"entry point {name!r} of {group} is {kind!r}; allowed: a subclass of {base.__name__} with "
                    f"name = {name!r}"
                )
            names.add(name)
            yield kind


def read_passes() -> dict[str, type[Pass]]:
    """All passes by name. Raises `ExtensionError` as `entries` does, and where passes disagree about a field."""
    own = list(_built_in())
    kinds = [*own, *_extensions({kind.name for kind in own})]
    table = {kind.name: kind for kind in sorted(kinds, key=lambda kind: (kind.rank, kind.name))}
    decisions: dict[str, tuple[Decision, type[Pass]]] = {}
    for kind in table.values():
        for decision in kind.decides:
            other, first = decisions.setdefault(decision.name, (decision, kind))
            if other != decision:
                raise ExtensionError(
                    f"pass {kind.name!r} decides {decision.name!r} as {decision}, but pass {first.name!r} as {other}; "
                    "give the field another name"
                )
    return table


PASSES: dict[str, type[Pass]] = read_passes()


def decisions_of(kinds: Iterable[type[Pass]]) -> list[Decision]:
    """The fields of a plan that these passes decide, each once, in the order of the passes."""
    decisions: dict[str, Decision] = {}
    words: dict[str, list[str]] = {}
    for kind in kinds:
        for decision in kind.decides:
            decisions.setdefault(decision.name, decision)
        if kind.word:
            words.setdefault(kind.fields()[0], []).append(kind.word)
    types: dict[str, Any] = {name: Literal[tuple(allowed)] for name, allowed in words.items()}
    return [dataclasses.replace(d, type=types.get(d.name, d.type)) for d in decisions.values()]
