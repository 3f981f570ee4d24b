"""Text documents that may come from anyone: plans, settings, manifests, descriptions of hardware.

A document is a regular file of bounded size in UTF-8. Anything else under its name (a pipe that nobody writes to, a
device, gigabytes) is refused before it is read.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pydantic
import yaml

MOST_BYTES = 256 << 20  # the manifest of a model with a hundred thousand parameters has 60 MB
MOST_NODES = 1_000_000  # of a YAML document


class Unreadable(ValueError):
    """A file is not such a document; the message says why, without the file's name."""


@contextmanager
def open_regular(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """Open a regular file to read its bytes, unbuffered. Raises `OSError`, or `Unreadable` for anything but a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would wait for a writer
    with open(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Unreadable("is not a regular file")
        yield file


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a document. Raises `Unreadable` for what is no document or cannot be read."""
    try:
        with open_regular(path) as file:
            if (num_bytes := os.fstat(file.fileno()).st_size) > MOST_BYTES:
                raise Unreadable(f"has {num_bytes} bytes; at most {MOST_BYTES} are read")
            return file.readall().decode("utf-8")
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"is no text in UTF-8 ({error.reason} at byte {error.start})") from error


def parse_json(text: str | bytes) -> Any:
    """JSON whose objects name each key once. Raises `Unreadable`."""
    try:
        return json.loads(text, object_pairs_hook=_distinct)
    except RecursionError as error:
        raise Unreadable("is no JSON that can be read: it is nested too deeply") from error
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"is no JSON ({error})") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """The value in a JSON document. Raises `Unreadable`."""
    return parse_json(read_text(path))


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The value in a YAML document, of plain data whose mappings name each key once. Raises `Unreadable`."""
    try:
        return yaml.load(read_text(path), Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise Unreadable(f"malformed YAML{where}: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise Unreadable("malformed YAML: it is nested too deeply") from error
    except Unreadable:
        raise
    except (ValueError, OverflowError) as error:  # a date or a number that Python does not have
        raise Unreadable(f"malformed YAML: {error}") from error


class _StrictLoader(yaml.SafeLoader):
    """YAML in which each key of a mapping is given once, and references stay small when written out."""

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _written_out(node, {})
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [(key.value, key.start_mark) for key, _ in node.value]
        for index, (key, mark) in enumerate(keys):
            if key in [earlier for earlier, _ in keys[:index]]:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", mark)
        return super().construct_mapping(node, deep)


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of nodes without references; a reference into itself counts as too many."""
    if id(node) not in known:
        known[id(node)] = MOST_NODES
        parts = node.value if isinstance(node, yaml.SequenceNode) else ()
        parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else parts
        known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    if known[id(node)] > MOST_NODES:
        raise yaml.constructor.ConstructorError(
            None, None, f"with its references written out it has more than {MOST_NODES} values", node.start_mark
        )
    return known[id(node)]


def plain_errors(error: pydantic.ValidationError) -> str:
    """The error in a document, in one line: the place, the rule, the value found."""
    rows = []
    for row in error.errors(include_url=False)[:8]:
        where = ".".join(str(part) for part in row["loc"]) or "the document"
        rows.append(f"{where}: {row['msg']}, found {_short(row.get('input'))}")
    return "; ".join(rows)


def other_fields(error: pydantic.ValidationError) -> str:
    """A remark on a document with other fields than this version of Penstock writes; "" for wrong values."""
    kinds = {row["type"] for row in error.errors(include_url=False)}
    return "; a file of another version of Penstock has other fields" if kinds & {"extra_forbidden", "missing"} else ""


def is_inside(name: str) -> bool:
    """Whether a relative path stays in the folder that it is relative to."""
    path = Path(name)
    return bool(name) and "\0" not in name and not path.is_absolute() and ".." not in path.parts


def _short(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise Unreadable(f"names {next(n for n in names if names.count(n) > 1)!r} twice in one object")
    return found
