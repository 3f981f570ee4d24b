"""The keys that calls of attention let their queries see, of masks that say it by places, documents and keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compiler.capture.trace import trace
from penstock.graph.masks.allowed_keys import Sight, sights_of
from penstock.graph.masks.calls import given_arguments

TOKENS = 12


class Attentions(nn.Module):
    """One call of attention with each of many masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)

    def forward(self, ids: Tensor, keep: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)[:, None]
        place, numbers = torch.arange(TOKENS), ids.eq(0).cumsum(1)
        causal, late = place <= place[:, None], place > place[:, None] - 4
        near = place < place[:, None] + 3
        padding, every = keep.bool()[:, None, None], place.new_ones((), dtype=torch.bool)
        masks = [
            causal & padding,
            every & causal & late & padding,
            late & near & padding,
            padding.expand(-1, 1, TOKENS, -1),
            causal & (numbers[:, None, :, None] == numbers[:, None, None]),
            causal & ((ids[:, None, :, None] + place) % 3 != 0),
            torch.zeros(1).masked_fill(~(causal & padding), float("-inf")),
            causal & place.new_ones((TOKENS, TOKENS), dtype=torch.bool),
        ]
        seen = [F.scaled_dot_product_attention(x, x, x, is_causal=is_causal) for is_causal in (False, True)]
        seen += [F.scaled_dot_product_attention(x, x, x, attn_mask=mask) for mask in masks]
        return {"loss": torch.stack(seen).sum()}


def test_what_queries_see_is_proven_apart_from_padding() -> None:
    graph = trace(Attentions(), {"ids": torch.arange(2 * TOKENS).view(2, -1) % 7, "keep": torch.ones(2, TOKENS)})
    calls = [n for n in graph.nodes if n.target is F.scaled_dot_product_attention]
    found = [*sights_of(graph, {n: given_arguments(n.args, n.kwargs) for n in calls}).values()]

    def tell(sight: Sight) -> tuple[object, ...]:
        shapes = [tuple(mask.meta["val"].shape[-2:]) for mask in sight.masks]
        return sight.before, sight.after, sight.documents is not None, *shapes

    keys, pairs = (1, TOKENS), (TOKENS, TOKENS)
    assert [tell(sight) for sight in found] == [
        (None, None, False),
        (None, 0, False),
        (None, 0, False, keys),
        (3, 0, False, keys),
        (3, 2, False, keys),
        (None, None, False, keys),
        (None, 0, True),
        (None, 0, False, pairs),
        (None, None, False, pairs),
        (None, 0, False),
    ]
    assert [sight.is_causal for sight in found] == [sight.before is None and sight.after == 0 for sight in found]
