"""Graphs that passes made, kept for candidates and machines that come to the same decision.

A pass over the op graph asks about memories when it decides. What it makes of a graph follows from the decision and
from the kinds of the devices, so that a search for the nearest machine that fits, which plans for one memory size after
another, finds most of its graphs and blocks here. They are kept beside the graph that they were made of.
"""

from __future__ import annotations

from typing import Any

from ...ir.machine.hardware import Hardware
from ..base import Pass
from ..draft import Draft
from .coarsen import Coarsen
from .graph_pass import GraphPass

PLACE = {"name", "host", "root_complex", "memory_bytes", "model_bytes"}  # of a device, and the size of its memory


class Rewriter:
    """Rewrites drafts for one machine."""

    def __init__(self, machine: Hardware):
        kinds = machine.device_kinds
        first = {kind: machine.devices[i] for i, kind in reversed(list(enumerate(kinds)))}
        order = sorted(first, key=kinds.index)
        self.devices = tuple(dict.fromkeys(first[kind].model_dump_json(exclude=PLACE) for kind in order))

    def __call__(self, p: Pass, draft: Draft, decision: Any) -> None:
        """Do what `p.rewrite` does, which is done once for the same graph, decision and kinds of devices."""
        if not isinstance(p, GraphPass | Coarsen) or draft.options.profiler is not None:
            p.rewrite(draft, decision)
            return
        known, key = draft.graph.known, (p, repr(decision), self.devices)
        if key not in known:
            p.rewrite(draft, decision)
            known[key] = draft.graph, draft.blocks, draft.notes.get(p.name)
        draft.graph, draft.blocks, note = known[key]
        if note is not None:
            draft.notes[p.name] = note
