"""Explains the loss: how each of its terms over the whole batch is put together from micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from ...graph.loss_terms import LossTerm

_RULES = {
    "mean": "each micro-batch counts alike",
    "counted": "a sum over the global batch, divided by {counts} in it, whatever micro_batches is",
    "weighted": "each micro-batch counts as loss_weight says",
    "uncounted": "divided by {counts} of each micro-batch alone: what the whole batch counts is not known before the "
    "forward, so that the loss is that of the whole batch with micro_batches=1 only",
}


def loss_lines(terms: Sequence[LossTerm], mini_batch: int = 0) -> list[str]:
    """One line per term: the user's line and the rule. `mini_batch`: the micro-batches of one, where each has updates
    of its own."""
    return [f"{term.source.partition(': ')[0] or 'loss'}: {_rule(term, mini_batch)}" for term in terms]


def _rule(term: LossTerm, mini_batch: int) -> str:
    if mini_batch == 1:
        return "each micro-batch is a mini-batch of its own, with its own mean"
    text = _RULES[term.kind].format(counts=term.counts)
    if not mini_batch:
        return text
    return text.replace("global batch", "mini-batch").replace("whole batch", "mini-batch") + (
        f"; every {mini_batch} micro-batches are a mini-batch"
    )
