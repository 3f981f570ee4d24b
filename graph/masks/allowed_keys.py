"""The keys that the queries of a call of attention see: by their places, by documents, and by the keys themselves.

In: a call, and its mask if it has one. Out: a window of places, and what of the mask these do not say. A mask that
transformers makes of a padded batch is a conjunction: of what follows from places (causal, a window), and of what shows
some keys to all queries (padding); neither needs a number for each pair of a query and a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...runtime.functions import packed_attention, window_attention
from ..opgraph import OpGraph
from .calls import window_of
from .documents import documents_of, parts_of, shows_all
from .visible import visible_keys


@dataclass(frozen=True)
class Sight:
    """The query at place i sees the keys from place i - before to i + after, all where that is None; of these, those
    that each of `masks` shows, and those of its own document."""

    before: int | None = None
    after: int | None = None
    masks: tuple[fx.Node, ...] = ()
    documents: fx.Node | None = None

    @property
    def is_causal(self) -> bool:
        """Whether it is a triangle: the later a query, the more keys it sees."""
        return self.before is None and self.after == 0


def sights_of(graph: OpGraph, calls: Mapping[fx.Node, Mapping[str, Any]]) -> dict[fx.Node, Sight]:
    """The keys that calls of attention with these arguments let their queries see. Layers most often share a mask."""
    masks: dict[fx.Node, Sight] = {}

    def sight_of(node: fx.Node, given: Mapping[str, Any]) -> Sight:
        if node.target is window_attention:
            return Sight(given["before"], given["after"])
        if node.target is packed_attention:
            return Sight(after=0, documents=given["documents"])
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node):
            return Sight(after=0) if given.get("is_causal") else Sight()
        if mask not in masks:
            masks[mask] = _mask_sight(graph, mask)
        return masks[mask]

    return {node: sight_of(node, given) for node, given in calls.items()}


def _mask_sight(graph: OpGraph, mask: fx.Node) -> Sight:
    documents = documents_of(graph, mask)
    if documents is not None:
        return Sight(after=0, documents=documents)
    length = mask.meta["val"].shape[-1]
    ends: tuple[list[int], list[int]] = [], []
    masks = []
    for part in parts_of(graph, mask):
        value = part.meta["val"]
        seen = visible_keys(graph, part) if value.dim() > 1 and value.shape[-2] == length else None
        window = None if seen is None else window_of(seen, length, length)
        if window is not None:
            for found, end in zip(ends, window):
                found += [] if end is None else [end]
        elif not shows_all(graph, part):
            masks.append(part)
    before, after = (min(found, default=None) for found in ends)
    return Sight(before, after, tuple(masks))
