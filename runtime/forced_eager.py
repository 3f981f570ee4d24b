"""Runs what a person has compiled with torch as written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_STANCE = RLock()  # torch has one stance for all threads: each puts back what it found


@contextmanager
def forced_eager() -> Iterator[None]:
    """No function that torch.compile made is compiled inside, or runs compiled."""
    with _STANCE, torch.compiler.set_stance("force_eager"):
        yield
