"""Lines of generated code: width, wrapping of long calls, comments in a column of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .expressions import Text

INDENT = "    "
MAX_WIDTH = 110  # of code; comments may stand behind it
COMMENT_COLUMN = 76


@dataclass(frozen=True)
class Line:
    """One statement: its text lines at `depth` (0: directly in the function), and a comment behind the last."""

    depth: int
    texts: list[str]
    comment: str = ""


def statement(left: str, text: Text, comment: str = "", depth: int = 0) -> Line:
    """`left` (such as "x = ") and an expression, wrapped where it is too wide for one line."""
    whole = f"{left}{text.text}"
    room = MAX_WIDTH - 4 * (depth + 2)
    if len(whole) <= room or text.arguments is None or len(text.arguments) < 2:
        return Line(depth, [whole], comment)
    function, *arguments = text.arguments
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
            rows[-1] = behind(rows[-1], line.comment)
        texts += rows
    return texts


def behind(code: str, comment: str) -> str:
    """Code with a comment at its end."""
    return f"{code.ljust(COMMENT_COLUMN)}  # {comment}" if comment else code
