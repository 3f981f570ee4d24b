"""Parts of parameters: rows of an embedding or a head that are a parameter of their own in stages.

A part knows its parameter and its rows (`RowPart`), so that whatever speaks of the model's own parameters finds them
here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from .stage import ParamSpec, RowPart, TeamPart


def whole_params(params: Iterable[ParamSpec]) -> list[ParamSpec]:
    """The model's parameters that these are, or are parts of, each once."""
    return list({param.whole_name: param.whole for param in params}.values())


def wrong_parts(params: Iterable[ParamSpec]) -> Iterator[str]:
    """The error among the parameters of one model: parts that overlap, leave a gap or are of another shape."""
    parts: dict[str, dict[str, RowPart]] = defaultdict(dict)
    for param in params:
        if isinstance(param.part, TeamPart):
            yield from _wrong_member_part(param, param.part)
        if not isinstance(param.part, RowPart):
            continue
        if not param.shape or param.shape[0] != param.part.end - param.part.begin:
            yield f"{param.name!r:.60} has the shape {list(param.shape)!s:.60}, but rows {rows_text(param.part)}"
        parts[param.part.parameter][param.name] = param.part
    for parameter, found in parts.items():
        rows = sorted(found.values(), key=lambda part: (part.begin, part.end))
        ends = [0, *(part.end for part in rows)]
        totals = {part.total for part in rows}
        if totals != {ends[-1]} or any(part.begin != end for part, end in zip(rows, ends)):
            told = ", ".join(map(rows_text, rows))
            yield f"the parts of {parameter!r:.60} are rows {told:.200} of {max(totals)}; each row is in one part"


def _wrong_member_part(param: ParamSpec, part: TeamPart) -> Iterator[str]:
    if part.members < 1 or part.blocks < 1 or not 0 <= part.dim < len(param.shape):
        what = f"each of {part.members} members has of dimension {part.dim} of {part.parameter!r:.60}"
        yield f"{param.name!r:.60} is what {what}"
    elif param.shape[part.dim] % part.blocks:
        yield f"{param.name!r:.60} has the shape {list(param.shape)!s:.60}, which is no {part.blocks} equal blocks"


def rows_text(part: RowPart) -> str:
    return f"{part.begin} to {part.end}"
