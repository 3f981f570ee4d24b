"""The table of models by name (published.json, which bench/model_table.py writes), and the spellings of their names.

A row is a configuration of `transformers` without its defaults, and where it was read. "Llama-3.2-3B", "llama3.2:3b"
and "meta-llama/Llama-3.2-3B-Instruct" mean the same row.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...ir.errors import PlanError

# Words that name an owner, and a variant of the same dimensions.
_OWNERS = {"meta", "unsloth", "hf"}
_VARIANTS = {
    "instruct", "chat", "it", "base", "thinking", "pt", "uncased", "cased", "preview", "reasoning", "plus", "python",
}  # fmt: skip
_NEAREST = 4  # names that a refusal offers
# Endings of files whose weights are packed.
_PACKED = re.compile(
    r"(?P<whole>.+?)[-_.](?P<form>(unsloth[-_])?bnb[-_]?4bit|gptq([-_]int[48])?|awq([-_]int4)?|gguf|nvfp4|[fm]xfp4|fp8"
    r"|int[48]|mlx|[48]bit)([-_].*)?",
    re.IGNORECASE,
)
BNB = "bnb"  # with which the form of bitsandbytes' files begins


@dataclass(frozen=True)
class ModelRow:
    """A published configuration. `names`: further names of the model."""

    name: str
    source: str
    config: dict[str, Any]
    names: tuple[str, ...] = ()


@functools.cache
def known_models() -> dict[str, ModelRow]:
    """The rows of the table by their names on the hub; papers' models have names of their own."""
    document = json.loads(Path(__file__).with_name("published.json").read_text())
    sources = document["sources"]
    return {
        name: ModelRow(name, sources.get(row["source"], row["source"]), row["config"], tuple(row.get("names", ())))
        for name, row in document["models"].items()
    }


def find_row(name: str) -> ModelRow | None:
    """The row that a name means; None for an unknown name. Raises `PlanError` for a name that several rows of different
    dimensions have."""
    found = _rows_of(_words(name))
    if len(found) > 1:
        names = ", ".join(row.name for row in found[:8]) + (", ..." if len(found) > 8 else "")
        raise PlanError(f"model {name!r} may be {names}; say which")
    return found[0] if found else None


def is_known(name: str) -> bool:
    """Whether a name means a row, or several."""
    return bool(_rows_of(_words(name)))


def packed_form(name: str) -> tuple[str, str]:
    """The name without an ending that says how its files are packed, and that ending in lower case; "" for whole
    weights: "unsloth/Qwen3-8B-bnb-4bit" is ("unsloth/Qwen3-8B", "bnb-4bit")."""
    match = _PACKED.fullmatch(name)
    if match is None or find_row(match["whole"]) is None:
        return name, ""
    return match["whole"], match["form"].lower().removeprefix("unsloth").lstrip("-_")


def near_names(name: str) -> list[str]:
    """The names of known models that are nearest to one that is unknown: of the same family first, then of the same
    size. Without a family alike, none."""
    words = _words(name)
    families = {_words(row.name)[0] for row in known_models().values()}
    alike = difflib.get_close_matches(words[0], families, 2, 0.6) if words else []
    alike = [words[0]] if words and words[0] in families else alike

    def distance(row: ModelRow) -> tuple[float, float]:
        own = _words(row.name)
        texts = [" ".join(_words(each)) for each in (row.name, *row.names)]
        return (
            abs(_size(words) - _size(own)) if _size(words) and _size(own) else 1.0,
            -max(difflib.SequenceMatcher(None, " ".join(words), text).ratio() for text in texts),
        )

    rows = [row for row in known_models().values() if _words(row.name)[0] in alike]
    nearest = sorted(rows, key=lambda row: distance(row)[1])[: 2 * _NEAREST]
    return [row.names[0] if row.names else row.name for row in sorted(nearest, key=distance)[:_NEAREST]]


def _rows_of(words: tuple[str, ...]) -> list[ModelRow]:
    """The rows with these words: exactly, else with fewer and fewer words of owner, variant and version, else the only
    ones that begin with them."""
    for level in range(4):
        found = _index(level).get(_strip(words, level), ())
        if found:
            return _distinct(found)
    begun = _strip(words, 3)
    found = [row for key, rows in _index(3).items() if begun and key[: len(begun)] == begun for row in rows]
    return _distinct(found)


def _distinct(rows: list[ModelRow] | tuple[ModelRow, ...]) -> list[ModelRow]:
    return list({json.dumps(row.config, sort_keys=True): row for row in reversed(rows)}.values())[::-1]


@functools.cache
def _index(level: int) -> dict[tuple[str, ...], list[ModelRow]]:
    found: dict[tuple[str, ...], list[ModelRow]] = {}
    for row in known_models().values():
        for key in {_strip(_words(name), level) for name in (row.name, *row.names)}:
            found.setdefault(key, []).append(row)
    return found


def _words(name: str) -> tuple[str, ...]:
    """The words and numbers of a name: "meta-llama/Llama-3.2-3B" is ("llama", "3.2", "3", "b")."""
    last = re.sub(r"^(https?://)?(huggingface|hf)\.co/", "", name.strip().lower()).rstrip("/").rpartition("/")[2]
    dotted = re.sub(r"(?<=\d)_(?=\d)", ".", last)  # "phi-1_5"
    return tuple(re.findall(r"\d+(?:\.\d+)*|[a-z]+", dotted))


def _strip(words: tuple[str, ...], level: int) -> tuple[str, ...]:
    """The words without owners (from level 1 on), variants (2), and versions, dates and lengths (3)."""
    kept = [word for word in words if not (level >= 1 and word in _OWNERS)]
    kept = [word for word in kept if not (level >= 2 and word in _VARIANTS)] or kept
    if level < 3:
        return tuple(kept)
    text = re.sub(r" v \d[\d.]*(?= |$)| \d{4}(?= |$)| \d+ k(?= |$)", "", " ".join(kept))
    return tuple(text.split())


def _size(words: tuple[str, ...]) -> float:
    """The logarithm of the size that a name has in millions or billions; 0.0 for a name without one."""
    sizes = [float(number) * {"m": 1, "b": 1000}[unit] for number, unit in pairwise(words)
             if unit in ("m", "b") and number.replace(".", "", 1).isdigit()]  # fmt: skip
    return math.log10(max(sizes)) if sizes else 0.0
