"""Passes over the op graph, which come before `coarsen` finds blocks in it.

In: `draft.graph`, which other candidates share. Out: another graph in its place that computes the same step; a rewrite
changes a copy (`copy_graph`), with the functions of `graph/edit.py` alone, which keep all edges between nodes.
"""

from __future__ import annotations

from typing import ClassVar

from ..base import Pass


class GraphPass(Pass):
    """Base of passes that rewrite the op graph. A job can do without any of them."""

    optional: ClassVar[bool] = True
