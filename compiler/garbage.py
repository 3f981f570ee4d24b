"""Slows Python's collector of reference cycles down while large graphs are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARE = (50_000, 20, 50)  # thresholds of Python's three generations


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for garbage cycles rarely: graphs of big models are many objects, and nearly all of them stay.

    That saves a quarter of the time to plan GPT-3 175B and costs 10 MB (bench/plan_time.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
