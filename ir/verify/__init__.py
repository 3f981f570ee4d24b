"""Proofs about programs before they run: see `rules.py`."""

from __future__ import annotations

from .rules import verify

__all__ = ["verify"]
