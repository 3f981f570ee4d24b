"""What `explain` says of the loss: how each of its terms over the whole batch is put together from micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from ...passes.graph.loss_terms import LossTerm

_RULES = {
    "mean": "each micro-batch counts alike",
    "weighted": "each micro-batch counts as loss_weight says",
    "uncounted": "divided by {counts} of each micro-batch alone: what the whole batch counts is not known before the "
    "forward, so that the loss is that of the whole batch with micro_batches=1 only",
}
_COUNTED = "a sum over the global batch, divided by the number of {counts} in it, whatever micro_batches is"
_WEIGHTS = "a sum over the global batch, divided by the {counts} in it, whatever micro_batches is"


def loss_lines(terms: Sequence[LossTerm], asynchronous: bool = False) -> list[str]:
    """One line per term: the user's line and the rule."""
    return [f"{term.source.partition(': ')[0] or 'loss'}: {_rule(term, asynchronous)}" for term in terms]


def _rule(term: LossTerm, asynchronous: bool) -> str:
    if asynchronous:
        return "each micro-batch is a mini-batch of its own, with its own mean"
    if term.kind == "counted":
        return (_COUNTED if term.counts.startswith("targets") else _WEIGHTS).format(counts=term.counts)
    return _RULES[term.kind].format(counts=term.counts)
