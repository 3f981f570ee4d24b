"""All passes by name, in the order of their ranks, and the fields of a plan that they decide."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeGuard

from .base import Pass
from .decisions import Decision

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


def _table(kinds: Iterable[type[Pass]]) -> dict[str, type[Pass]]:
    return {kind.name: kind for kind in sorted(kinds, key=lambda kind: (kind.rank, kind.name))}


PASSES: dict[str, type[Pass]] = _table(_built_in())


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
