"""`chunk-loss`: a head and its cross entropy in chunks of tokens, so that logits never exist whole.

In: the op graph. Out: a graph in which one call, `functions.chunked_cross_entropy`, replaces the product of the head
and the loss. It makes the logits once more in backward, and keeps what the head multiplies and one number per
token. Logits that the model returns are made in evaluation only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...graph.edit import copy_graph
from ...graph.loss.chunk_head import (
    CHUNK_SHARE,
    LossChunk,
    chunk_head,
    is_large,
    refusal,
    tokens_of_chunk,
    workspace_bytes,
)
from ...graph.loss.head_loss import HeadLoss, head_losses
from ...ir.errors import PassError
from ...ir.units import format_bytes
from ..base import Pass, PlanSoFar
from ..decisions import Decision
from ..draft import Draft
from .graph_pass import GraphPass

OUTPUT_SHARE = 1 / 4  # of the smallest device: larger logits are no outputs of evaluation

Chunks = dict[str, LossChunk]  # a cross entropy's node -> its chunks


@dataclass(frozen=True)
class ChunkLoss(GraphPass):
    """`tokens`: of each chunk, or automatic: logits that are large for a device, in chunks that are not."""

    name: ClassVar[str] = "chunk-loss"
    rank: ClassVar[int] = 15
    everywhere: ClassVar[bool] = True  # no strategy is about keeping large logits
    absent: ClassVar[str] = "whole logits"
    # cross entropy -> the chunks in which its logits are made
    decides: ClassVar[tuple[Decision, ...]] = (Decision("chunks", dict[str, LossChunk], {}, hashed=True),)
    automatic: ClassVar[tuple[str, ...]] = ("tokens",)
    tokens: int = 0

    @classmethod
    def variants(cls, best: PlanSoFar) -> Sequence[Pass | None]:
        """Whole logits, if they are made in chunks, or chunks, if there could be some."""
        if best.find(cls) is None:
            return []
        if cls().plan(best.start):
            return [None]
        tokens = worth_a_try(best.start)
        return [cls(tokens)] if tokens else []

    def plan(self, draft: Draft) -> Chunks:
        """Raises `PassError` where `tokens` is given and every cross entropy needs its logits whole."""
        room_bytes, rows = _room(draft), draft.graph.once(head_losses)
        heads = [row for row in rows if isinstance(row, HeadLoss) and not refusal(row)]
        found: Chunks = {}
        for head in heads:
            tokens = self.tokens or tokens_of_chunk(head, room_bytes)
            if tokens < head.num_tokens and (self.tokens or is_large(head, room_bytes)):
                found[head.loss.name] = LossChunk(tokens=tokens, logits=head.logits_bytes <= OUTPUT_SHARE * room_bytes)
        if self.tokens and not heads:
            reasons = [f"{row.loss.name} ({row.loss.meta.get('source', '')}): {refusal(row)}" for row in rows]
            none = "no cross entropy of this model follows a head (split-vocabulary, which cuts heads, comes after it)"
            raise PassError(f"chunk-loss: no loss can be made in chunks: {'; '.join(reasons) or none}")
        return found

    def rewrite(self, draft: Draft, decision: Chunks) -> None:
        if not decision:
            return
        graph = copy_graph(draft.graph)
        heads = {row.loss.name: row for row in head_losses(graph)}
        notes = []
        for name, chunk in decision.items():
            head = heads.get(name)
            if head is None:
                known = ", ".join(heads) or "none"
                raise PassError(f"chunk-loss: {name!r} is no cross entropy of this model; it has {known}")
            if not isinstance(head, HeadLoss) or refusal(head):
                raise PassError(f"chunk-loss: {name} cannot go without whole logits: {refusal(head)}")
            notes.append(_note(head, chunk))
            chunk_head(graph, head, chunk)
        draft.notes[self.name] = "; ".join(notes)
        graph.rebuild()
        draft.graph = graph


def worth_a_try(draft: Draft) -> int:
    """The number of tokens of a chunk where logits stay whole unless it is given, though they are larger than a chunk;
    0 where there are none."""
    room_bytes = _room(draft)
    heads = [row for row in draft.graph.once(head_losses) if isinstance(row, HeadLoss) and not refusal(row)]
    sizes = [tokens_of_chunk(head, room_bytes) for head in heads if is_large(head, room_bytes, CHUNK_SHARE)]
    return min(sizes, default=0)


def _room(draft: Draft) -> int:
    """The bytes of the smallest device."""
    return min(device.budget_bytes for device in draft.machine.devices)


def _note(head: HeadLoss, chunk: LossChunk) -> str:
    pieces = -(-head.num_tokens // chunk.tokens)
    at_once = format_bytes(workspace_bytes(head, chunk.tokens))
    text = f"the {head.num_classes} logits of {head.num_tokens} tokens are made in {pieces} chunks of {at_once}"
    if head.outputs and not chunk.logits:
        text += f"; evaluation gives no {', '.join(head.outputs)}, which would exist whole"
    return text
