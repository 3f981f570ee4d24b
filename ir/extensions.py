"""The entry points of other distributions, which add passes, schedules, presets of hardware and records of operators.

Every table of ours that may grow asks `entries` for its group when it is made. docs/extensions.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from typing import Any

from .errors import ExtensionError


def entries(group: str, exists: Callable[[str], bool]) -> dict[str, Any]:
    """The objects of a group of entry points, by name. `exists`: whether a table of ours has a name already.

    Raises `ExtensionError` for an entry that cannot be imported, and for a name that exists already.
    """
    objects: dict[str, Any] = {}
    for entry in sorted(metadata.entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        where = f"entry point {entry.name!r} = {entry.value!r} of {group}{_distribution_text(entry)}"
        if exists(entry.name) or entry.name in objects:
            raise ExtensionError(f"{where}: the name {entry.name!r} exists already; choose another one")
        try:
            objects[entry.name] = entry.load()
        except Exception as error:  # whatever a stranger's module raises, the user must learn whose it is
            raise ExtensionError(
                f"{where} cannot be loaded: {type(error).__name__}: {error}. Mend or uninstall that distribution"
            ) from error
    return objects


def _distribution_text(entry: metadata.EntryPoint) -> str:
    return "" if entry.dist is None else f", distribution {entry.dist.name} {entry.dist.version}"
