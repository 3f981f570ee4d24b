"""docs/models.md, from the rows of the zoo."""

from __future__ import annotations

from typing import Any


def write_page(rows: list[dict[str, Any]]) -> str:
    return ""
