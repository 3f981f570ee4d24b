"""The error in a hardware document, in words: the key, the value found, what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, BeforeValidator, ValidationError

from ..units import EXAMPLES


def close_names(name: str, names: Iterable[str]) -> str:
    """ "; did you mean ...?" for the nearest of `names`, or all of them when none is near."""
    known = list(names)
    lowered = {each.lower(): each for each in known}
    near = [lowered[each] for each in get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
    near = near or [each for each in known if name and each.lower().startswith(name.lower())]
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else f"; known: {', '.join(known)}"


def explain_validation(error: ValidationError, model: type[BaseModel]) -> str:
    """One line per problem of a document checked against `model`."""
    return "\n".join(_explain(problem, model) for problem in error.errors(include_url=False))


def _explain(problem: Any, model: type[BaseModel]) -> str:
    where, kind, found = key_path(problem["loc"]), problem["type"], problem["input"]
    if kind == "missing":
        return f"{where}: missing{_write(problem['loc'], model)}"
    if kind == "extra_forbidden":
        fields = _model_at(problem["loc"][:-1], model).model_fields
        return f"{where}: unknown key{close_names(str(problem['loc'][-1]), fields)}"
    text = repr(found)
    found_text = text if len(text) <= 60 else f"{text[:57]}..."
    allowed = str(problem["ctx"]["error"]) if kind == "value_error" else _allowed_values(problem["msg"])
    return f"{where}: found {found_text}, allowed: {allowed}"


def _write(location: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """The way to write an amount with a unit, where a document lacks one; empty for other fields."""
    field = _model_at(location[:-1], model).model_fields.get(str(location[-1]))
    rules = [rule.func for rule in (field.metadata if field else ()) if isinstance(rule, BeforeValidator)]
    example = next((EXAMPLES[rule] for rule in rules if rule in EXAMPLES), "")
    return f"; write a number with a unit, such as {example!r}" if example else ""


def _allowed_values(message: str) -> str:
    return message.removeprefix("Input should be ").removeprefix("Input should ").removeprefix("Value error, ")


def key_path(location: tuple[int | str, ...]) -> str:
    """("hosts", 0, "dram_bytes") as hosts[0].dram_bytes."""
    path = ""
    for part in location:
        if part == "[key]":  # pydantic's mark for a wrong key of a mapping; the key itself comes before it
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or "document"


def _model_at(location: tuple[int | str, ...], model: type[BaseModel]) -> type[BaseModel]:
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for each in get_args(annotation) if (found := _model_in(each)) is not None), None)
