"""Which models of the zoo the default tests leave to the slow ones, because another shows the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

ALIKE = {"opt", "mistral", "qwen3", "roberta"}  # each is much like gpt2, llama or bert


def with_alike_slow(names: Iterable[str]) -> list[Any]:
    """The names as parameters of a test; those of models that are much like another are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in names]
