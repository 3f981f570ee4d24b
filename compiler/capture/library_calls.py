"""Functions of other libraries that forward calls with tensors, and the functions that programs call in their place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...runtime.functions import linear_sum_assignment

MATCHING = "scipy.optimize"
IN_PROGRAMS: dict[tuple[str, str], Callable[..., Any]] = {
    (MATCHING, "linear_sum_assignment"): linear_sum_assignment,  # detection: predictions and their targets
    ("numpy", "concatenate"): torch.cat,  # of what the one above gives
}


def library_calls() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """The modules that have such a function, its name in them, and the function of programs. All modules are looked at,
    thousands of them for every recording, and so only where the library is there on which the others depend."""
    if MATCHING not in sys.modules:
        return
    for (home, name), own in IN_PROGRAMS.items():
        original = getattr(sys.modules.get(home), name, None)
        for module in list(sys.modules.values()) if original is not None else ():
            if getattr(module, "__dict__", {}).get(name) is original:
                yield module, name, own
