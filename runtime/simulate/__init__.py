"""The simulator: it runs programs with time as their only effect, see `engine.py`."""

from __future__ import annotations

from .costs import CostModel, costs_of
from .engine import simulate
from .stragglers import Straggler, find_stragglers
from .timeline import Span, Timeline

__all__ = ["CostModel", "Span", "Straggler", "Timeline", "costs_of", "find_stragglers", "simulate"]
