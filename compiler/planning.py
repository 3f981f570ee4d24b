"""Settings of Python and torch while a plan is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

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


@contextmanager
def planning() -> Iterator[None]:
    """Make tensors on the CPU, whatever the script's default device is, and look for garbage rarely."""
    import torch  # commands that plan nothing do without it

    is_on_cpu = torch.empty(0).device.type == "cpu"  # then without a context, which each call of torch would pass
    with nullcontext() if is_on_cpu else torch.device("cpu"), rare_collections():
        yield
