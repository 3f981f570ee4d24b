"""Attention as a ring of a team's members: queries stay, and keys and values go round (Ring Attention, Liu 2023).

In: calls of attention in an op graph, each with a member's own tokens. Out: blocks, one for each round in which queries
see keys, which add to what came of those before (`runtime/functions/ring_attention.py`), and exchanges (`pass_on`)
between them.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from ...runtime.functions import attend_block, attention_of, with_gradients
from ...runtime.functions.ring_attention import visible_steps
from ..edit import GraphEdit
from ..masks.allowed_keys import sights_of
from ..masks.grouped_heads import heads_before_repeat
from ..opgraph import OpGraph
from .attention import TOKENS, SharedAttention, attention_call
from .exchanges import pass_on


class AttentionRings:
    """The calls of attention of a graph, each to be a ring. `keep`: whether the keys and values that came round are
    kept until backward."""

    def __init__(self, graph: OpGraph, team: int, keep: bool):
        self.graph, self.team, self.keep = graph, team, keep
        calls = ((node, attention_call(node)) for node in graph.nodes)
        self.sights = sights_of(graph, {node: call.arguments for node, call in calls if call is not None})

    @property
    def is_zigzag(self) -> bool:
        """Whether each member has a run of tokens from the front and one from the end, so that all have the same
        work."""
        return any(sight.is_causal for sight in self.sights.values())

    def refusal(self, node: fx.Node) -> str:
        """The reason why a call cannot be a ring; empty where it can."""
        if any(mask.meta["val"].requires_grad for mask in self.sights[node].masks):
            return "adds a bias that is trained to what queries see of keys; by=heads takes it"
        return ""

    def write(
        self, node: fx.Node, call: SharedAttention, member: fx.Node, known: Collection[fx.Node]
    ) -> tuple[fx.Node, list[fx.Node]]:
        """Write a ring in the place of a call: its result, and the masks that are made for it of the batch alone.

        `member`: the input with the device's number; `known`: the nodes that members have computed by now."""
        sight = self.sights[node]
        edit, (key, value) = GraphEdit(self.graph, node), (heads_before_repeat(n)[0] for n in (call.key, call.value))
        if key.meta["val"].shape != value.meta["val"].shape or key not in known or value not in known:
            key, value = call.key, call.value
        wanted = {"before": sight.before, "after": sight.after, "scale": call.arguments.get("scale")}
        options: dict[str, Any] = {name: given for name, given in wanted.items() if given is not None}
        options |= {"zigzag": True} if self.is_zigzag else {}
        options |= {} if sight.documents is None else {"documents": sight.documents}
        masks = _join_masks(edit, sight.masks)
        options |= {"mask": masks[-1]} if masks else {}
        tokens = call.query.meta["val"].shape[TOKENS]
        steps = visible_steps(tokens, self.team, self.is_zigzag, sight.before, sight.after)
        partial: fx.Node | None = None
        lasts: dict[str, Any] = {"lasts": True} if self.keep else {}
        for step in range(max(steps) + 1):
            key, value = (edit.call(pass_on, n, self.team, **lasts) for n in (key, value)) if step else (key, value)
            if step in steps:
                partial = _block(edit, partial, (call.query, key, value, member, step, self.team), options)
        assert partial is not None
        return edit.call(attention_of, partial, node.meta["val"].dtype), masks[1:]


def _block(edit: GraphEdit, partial: fx.Node | None, operands: tuple[Any, ...], options: dict[str, Any]) -> fx.Node:
    """The partial attention with one more block, which has its gradients from a call of its own."""
    block = edit.call(attend_block, partial, *operands, **options)
    block.meta["no_grad"] = True
    return edit.call(with_gradients, block, *operands, **options)


def _join_masks(edit: GraphEdit, masks: Sequence[fx.Node]) -> list[fx.Node]:
    """The first mask, and after each further one what all of them up to it show."""
    found = list(masks[:1])
    for mask in masks[1:]:
        found.append(edit.call(operator.and_, found[-1], mask))
    return found
