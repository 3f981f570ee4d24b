"""The simulator: it runs programs with time as their only effect, see `engine.py`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .costs import CostModel, costs_of
    from .engine import seconds_from_rest, simulate, simulate_steps, step_seconds
    from .stragglers import Straggler, find_stragglers, slow_devices
    from .timeline import Span, Timeline

__all__ = [
    "CostModel", "Span", "Straggler", "Timeline", "costs_of", "find_stragglers",
    "seconds_from_rest", "simulate", "simulate_steps", "slow_devices", "step_seconds",
]  # fmt: skip

# Imported at first use: a worker records spans and simulates nothing.
_HOMES = {
    "CostModel": ".costs", "Span": ".timeline", "Straggler": ".stragglers", "Timeline": ".timeline",
    "costs_of": ".costs", "find_stragglers": ".stragglers", "slow_devices": ".stragglers", "simulate": ".engine",
    "simulate_steps": ".engine", "step_seconds": ".engine", "seconds_from_rest": ".engine",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name], __name__), name)
