"""For the site: in the description of a function or class each argument begins a point of a list."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Arguments(griffe.Extension):
    """Rewrites docstrings in which paragraphs say "name: what it is"."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        if func.docstring is not None:
            func.docstring.value = list_points(func.docstring.value, [parameter.name for parameter in func.parameters])

    def on_class_members(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.docstring is not None:
            begin = cls.members.get("__init__")
            names = [each.name for each in begin.parameters] if isinstance(begin, griffe.Function) else []
            cls.docstring.value = list_points(cls.docstring.value, [*names, *cls.attributes])


def list_points(text: str, names: list[str]) -> str:
    """The text with a point for each "name: " that begins a line or sentence."""
    if not names:
        return text
    name = "|".join(map(re.escape, names))
    begins = re.compile(rf"(?:^|(?<=[.;)]\s))(?=(?:{name})(?:, (?:{name}))*: )", re.MULTILINE)
    return "\n\n".join(_points(paragraph, begins) for paragraph in text.split("\n\n"))


def _points(paragraph: str, begins: re.Pattern[str]) -> str:
    first, *points = begins.split(paragraph)
    found = [re.sub(r"^([\w, ]+):", r"- **\1**:", point.strip(), count=1) for point in points]
    return "\n\n".join(part for part in (first.strip(), "\n".join(found)) if part)
