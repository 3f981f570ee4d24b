"""Lines of generated code: width, wrapping of long calls, comments in a column of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..ir.program import SHORT_DTYPES
from .expressions import Text
from .paths import one_line

INDENT = "    "
MAX_WIDTH = 110  # of code; comments may follow it
COMMENT_COLUMN = 76
MIN_WRAPPED = 24  # shorter arguments are not worth lines of their own


@dataclass(frozen=True)
class Line:
    """One statement: its text lines at `depth` (0: directly in the function), and a comment after the last."""

    depth: int
    texts: list[str]
    comment: str = ""

    @property
    def is_wide(self) -> bool:
        return max(map(len, self.texts)) > MAX_WIDTH - 4 * (self.depth + 2)


def statement(left: str, text: Text, comment: str = "", depth: int = 0) -> Line:
    """`left` (such as "x = ") and an expression, wrapped where it is too wide for one line."""
    whole = f"{left}{text.text}"
    room = MAX_WIDTH - 4 * (depth + 2)
    function, *arguments = text.arguments or ("",)
    if len(whole) <= room or sum(map(len, arguments)) < MIN_WRAPPED:
        return Line(depth, [whole], comment)
    rows = [""]
    for argument in arguments:
        if rows[-1] and len(rows[-1]) + len(argument) + 2 > room - 4:
            rows.append("")
        rows[-1] += f"{' ' if rows[-1] else ''}{argument},"
    rows[-1] = rows[-1].removesuffix(",") if len(rows) == 1 else rows[-1]
    return Line(depth, [f"{left}{function}(", *(INDENT + row for row in rows), ")"], comment)


def block(lines: Iterable[Line], depth: int) -> list[str]:
    """Source lines, indented by `depth` levels, comments aligned."""
    texts: list[str] = []
    for line in lines:
        indent = INDENT * (depth + line.depth)
        rows = [f"{indent}{row}" if row else "" for row in line.texts]
        if line.comment:
            rows[-1] = with_comment(rows[-1], line.comment)
        texts += rows
    return texts


def type_text(shape: Iterable[Any], dtype: torch.dtype) -> str:
    """A tensor's type for a comment: `f32[2, 512, 768]`."""
    name = str(dtype).removeprefix("torch.")
    return f"{SHORT_DTYPES.get(name, name)}[{', '.join(map(str, shape))}]"


def signature(code: str, comment: str) -> list[str]:
    """The line of a `def` with the types of its arguments after it, or below it if they are long."""
    if len(with_comment(code, comment)) <= MAX_WIDTH + 10 or not comment:
        return [with_comment(code, comment)]
    comment = one_line(comment)
    indent = " " * (len(code) - len(code.lstrip()) + 4) + "# "
    return [code, *textwrap.wrap(comment, MAX_WIDTH, initial_indent=indent, subsequent_indent=indent)]


def with_comment(code: str, comment: str) -> str:
    return f"{code.ljust(COMMENT_COLUMN)}  # {one_line(comment)}" if comment else code
