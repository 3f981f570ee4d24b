"""Sizes of blocks."""

from __future__ import annotations


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def ceil_div(size: int, part: int) -> int:
    return -(-size // part)
