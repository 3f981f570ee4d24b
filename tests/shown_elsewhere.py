"""Models of the zoo that the default tests leave to the slow ones, because another shows the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

ALIKE = {"opt", "mistral", "qwen3", "roberta"}  # each is much like gpt2, llama or bert
KINDS = ("gpt2", "t5", "mixtral", "wide_resnet", "custom_function", "in_place", "lstm")  # one of each kind


def slow_but(fast: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """The values as parameters of a test; all but `fast` are slow, because these show the same."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def with_alike_slow(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; those of models that are much like another are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in names]
