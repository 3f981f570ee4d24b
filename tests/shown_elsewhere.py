"""Models of the zoo that the default tests leave to the slow ones, because another shows the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

KINDS = ("gpt2", "t5", "mixtral", "wide_resnet", "custom_function", "in_place", "lstm")  # one of each kind


def slow_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test; all but `fast` are slow, because these show the same."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_rows_but(fast: Collection[tuple[Any, ...]], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same of rows, each with the values of several parameters."""
    return [row if row in fast else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def core_of(telling: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test; those in `telling` belong to `make gpu-emulated-core`. A tuple has the values
    of several parameters."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.emulated_core] * (value in telling)) for value, row in rows]
