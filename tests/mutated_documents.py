"""Documents as a stranger could have altered them: one random change at a time, repeatable from a seed."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CANARY = "canary"  # the file that code in a document would make
NESTED: Any = []
for _ in range(200):
    NESTED = [NESTED]


def nasty_values(canary: Path) -> list[Any]:
    """Values that a reader may not expect: wrong types, extremes, paths out of a folder, code."""
    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    return [
        None, True, False, -1, 0, 1, 3, 10**9, 2**63, 10**30, -(10**30), 0.5, -1.5, 1e308, math.inf, math.nan,
        "", "x", "0", "../../x", "/etc/passwd", f"../{CANARY}", "a\0b", "\ud800", "s" * 5000, code,
        f"os:system('{code}')", "subprocess:run",
        "builtins:exec", "function:builtins:eval", "torch.hub:load", "load", "float32", "F32", "nan",
        [], [[]], [-1], [10**9, 10**9], [None], ["x"], {}, {"x": 1}, {"": None}, NESTED,
        {"__penstock__": "tensor", "dtype": "F32", "shape": [10**9], "hex": ""}, {"__penstock__": "x"},
        {"__penstock__": "tuple", "items": [1, 2]}, {"__penstock__": "dict", "items": [[[], 1]]},
        {"__penstock__": "counter", "items": 3}, {"__penstock__": "tensor", "dtype": "F32", "shape": [1], "hex": "zz"},
    ]  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values inside a document, itself included."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def change_values(document: Any, draw: random.Random, values: list[Any]) -> Any:
    """A copy of a document of plain data with one change. Short paths are as likely as the many long ones."""
    document = copy.deepcopy(document)
    by_depth: dict[int, list[tuple[Any, ...]]] = {}
    for path in places(document):
        by_depth.setdefault(len(path), []).append(path)
    path = draw.choice(by_depth[draw.choice(list(by_depth))])
    if not path:
        return draw.choice(values)
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    last = path[-1]
    what = draw.choice(["value", "value", "value", "delete", "rename", "copy", "exchange"])
    if what == "value":
        owner[last] = copy.deepcopy(draw.choice(values))
    elif what == "delete":
        del owner[last]
    elif what == "rename" and isinstance(owner, dict):
        owner[draw.choice([str(v) for v in values if isinstance(v, str)])] = owner.pop(last)
    elif what == "copy" and isinstance(owner, list):
        owner.insert(last, copy.deepcopy(owner[last]))
    else:
        keys = list(owner) if isinstance(owner, dict) else list(range(len(owner)))
        other = draw.choice(keys)
        owner[last], owner[other] = owner[other], owner[last]
    return document


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """A copy of a file's bytes with one piece cut, doubled, overwritten or moved."""
    place = draw.randrange(len(data) + 1)
    size = draw.choice([1, 1, 2, 8, 64, 1000])
    piece = bytes(draw.randrange(256) for _ in range(size))
    what = draw.choice(["cut", "end", "insert", "over", "double", "none"])
    if what == "cut":
        return data[:place] + data[place + size :]
    if what == "end":
        return data[:place]
    if what == "insert":
        return data[:place] + piece + data[place:]
    if what == "over":
        return data[:place] + piece + data[place + size :]
    return data[:place] + data[place : place + size] + data[place:] if what == "double" else b""


def replace_file(path: Path, draw: random.Random) -> None:
    """Put something that is no file in its place: a pipe, a directory, a link, nothing."""
    path.unlink()
    what = draw.choice(["pipe", "directory", "link", "circle", "nothing"])
    if what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    elif what == "link":
        path.symlink_to("/dev/zero")
    elif what == "circle":
        path.symlink_to(path.name)


def mutate(path: Path, draw: random.Random, values: list[Any], write: Callable[[Any], str] | None) -> None:
    """Alter one file: its value where `write` turns plain data into text (JSON is read as plain data), its bytes, or
    what it is."""
    what = draw.random()
    if what < 0.03:
        replace_file(path, draw)
    elif what < 0.15 or write is None:
        path.write_bytes(changed_bytes(path.read_bytes(), draw))
    else:
        text = write(change_values(json.loads(path.read_text()), draw, values))
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
