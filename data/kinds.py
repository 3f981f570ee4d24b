"""The kinds of data: which columns each has, and which kind a file is of."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, NoReturn

from ..ir.errors import PlanError
from .files import Record

MESSAGES = ("messages", "conversations", "conversation")
PROMPT = ("prompt", "instruction", "question", "query", "input")
COMPLETION = ("completion", "output", "response", "answer")
COLUMNS: dict[str, dict[str, tuple[str, ...]]] = {  # kind -> column -> the names that it usually has
    "chat": {"messages": MESSAGES},
    "preference": {"chosen": ("chosen",), "rejected": ("rejected",)},
    "completion": {"prompt": PROMPT, "completion": COMPLETION},
    "classification": {"text": ("text", "sentence", "content"), "label": ("label", "labels", "class")},
    "seq2seq": {
        "source": ("source", "document", "article", *PROMPT, "text"),
        "target": ("target", "summary", "highlights", *COMPLETION),
    },
    "text": {"text": ("text", "content")},
}
OPTIONAL: dict[str, dict[str, tuple[str, ...]]] = {  # the same of columns that a row may lack
    "chat": {"tools": ("tools",), "system": ("system",), "images": ("images", "image")},
    "preference": {"prompt": ("prompt",)},
    "completion": {"input": ("input",)},
}
HEADS = {  # others: causal-lm
    "classification": ("classification",), "seq2seq": ("seq2seq",), "image-text-to-text": ("chat",),
}  # fmt: skip


def kind_of(record: Record, wished: str, head: str, columns: Mapping[str, str]) -> str:
    """The kind of data with such records for a model with that head. Raises `PlanError` where it is of none, or of one
    that the model does not learn from."""
    allowed = HEADS.get(head, tuple(kind for kind in COLUMNS if kind not in HEADS))
    if wished != "auto":
        if wished not in allowed:
            raise PlanError(f"--kind {wished}: a model with the head {head} learns from {', '.join(allowed)}")
        return wished
    for kind in allowed:
        if all(_find(record.values, name, usual, columns) for name, usual in COLUMNS[kind].items()):
            return kind
    for kind in allowed:  # with a null in one of its columns, as `columns_of` will say
        if all(any(each in record.values for each in usual) for usual in COLUMNS[kind].values()):
            return kind
    if len(allowed) == 1:
        return allowed[0]  # `columns_of` says which of its columns is missing
    _refuse_columns(record, allowed)


def columns_of(record: Record, kind: str, columns: Mapping[str, str]) -> dict[str, str]:
    """For each column of the kind its name in this record, optional ones where they are there. Raises `PlanError` for
    one that is missing."""
    optional = OPTIONAL.get(kind, {})
    unknown = [name for name in columns if name not in COLUMNS[kind] and name not in optional]
    if unknown:
        allowed = ", ".join((*COLUMNS[kind], *optional))
        raise PlanError(f"--column {unknown[0]}=...: {kind} has the columns {allowed}")
    found: dict[str, str] = {}
    for name, usual in COLUMNS[kind].items():
        column = _find(record.values, name, usual, columns)
        if column is None:
            wanted = columns.get(name, name)
            empty = [each for each in ((wanted,) if name in columns else usual) if each in record.values]
            if empty:
                raise PlanError(f'{record.where}: "{empty[0]}" is null, allowed: what {kind} learns from; leave it out')
            there = ", ".join(record.values) or "none"
            near = difflib.get_close_matches(wanted, record.values, 1, 0.4)
            also = f" (or {', '.join(usual[1:])})" if usual[1:] and name not in columns else ""
            hint = f"; the nearest is {near[0]!r}: --column {name}={near[0]}" if near else f"; --column {name}=NAME"
            raise PlanError(f'{record.where}: no column "{wanted}"{also}, which {kind} needs; there are: {there}{hint}')
        found[name] = column
    for name, usual in optional.items():
        column = _find(record.values, name, usual, columns)
        if column is not None and column not in found.values():
            found[name] = column
    return found


def _find(values: Mapping[str, Any], name: str, usual: tuple[str, ...], columns: Mapping[str, str]) -> str | None:
    names = (columns[name],) if name in columns else usual
    return next((each for each in names if values.get(each) is not None), None)


def _refuse_columns(record: Record, allowed: tuple[str, ...]) -> NoReturn:
    needs = "; ".join(f"{kind}: {_names(kind)}" for kind in allowed)
    there = ", ".join(record.values) or "none"
    wanted = [name for kind in allowed for names in COLUMNS[kind].values() for name in names]
    unknown = [key for key in record.values if key not in wanted]
    near = [(key, close[0]) for key in unknown if (close := difflib.get_close_matches(key.lower(), wanted, 1))]
    hint = f"; is {near[0][0]!r} meant as {near[0][1]!r}?" if near else "."
    raise PlanError(
        f"{record.where}: its columns are of no kind: {there}. The kinds have {needs}{hint} --column "
        f"{_missing(record, allowed)}=NAME says which is which"
    )


def _missing(record: Record, allowed: tuple[str, ...]) -> str:
    """The column that is missing of the kind of which another is there; else "text"."""
    for kind in allowed:
        there = {name: any(each in record.values for each in usual) for name, usual in COLUMNS[kind].items()}
        if any(there.values()):
            return next(name for name, found in there.items() if not found)
    return "text"


def _names(kind: str) -> str:
    return ", ".join(
        f"{names[0]} (or {', '.join(names[1:])})" if names[1:] else names[0] for names in COLUMNS[kind].values()
    )
