"""Heads and their cross entropies in chunks of tokens: how a chunk is cut, and the edit of the op graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import fx

from ...ir.calls import call_name
from ...runtime.functions import chunked_cross_entropy, evaluation_logits
from ..edit import GraphEdit, erase_dead, replace_uses, set_arguments, set_evaluation, set_outputs
from ..opgraph import OpGraph
from .head_loss import HeadLoss, NodeOrName, WholeLogits


class LossChunk(BaseModel):
    """A cross entropy in chunks, without whole logits. `tokens`: the number of tokens whose logits are kept at once;
    `logits`: whether evaluation gives the logits that the model returns, which are then whole there."""

    model_config = ConfigDict(extra="forbid")
    tokens: Annotated[int, Field(ge=1)]
    logits: bool = True


LEAST_BYTES = 16 * 2**20  # smaller logits stay whole on any device
WHOLE_SHARE = 1 / 16  # of the smallest device: logits that take no more stay whole, as chunks are made twice
CHUNK_SHARE = 1 / 64  # of the smallest device, for the logits of one chunk


def workspace_bytes(head: HeadLoss, tokens: int) -> int:
    """Bytes of the logits of this number of tokens, in the dtype of the product and in that of the loss."""
    wide = torch.promote_types(head.logits_dtype, torch.float32)
    return tokens * head.num_classes * sum(dtype.itemsize for dtype in {head.logits_dtype, wide})


def is_large(head: HeadLoss, room_bytes: int, share: float = WHOLE_SHARE) -> bool:
    """Whether whole logits, with their logarithms of probabilities and their gradient, take more than a share of a
    device with this room."""
    wide = torch.promote_types(head.logits_dtype, torch.float32)
    whole_bytes = head.logits_bytes + 2 * head.num_tokens * head.num_classes * wide.itemsize
    return whole_bytes > max(LEAST_BYTES, share * room_bytes)


def tokens_of_chunk(head: HeadLoss, room_bytes: int) -> int:
    """The largest number of tokens whose logits are small on a device with this room."""
    share = max(LEAST_BYTES / 4, CHUNK_SHARE * room_bytes)
    return min(head.num_tokens, max(1, int(share / workspace_bytes(head, 1))))


def refusal(head: HeadLoss | WholeLogits) -> str:
    """The reason why a head with its loss cannot be made in chunks; empty where it can."""
    if isinstance(head, WholeLogits):
        return head.reason
    if head.loss_dtype.itemsize > torch.promote_types(head.logits_dtype, torch.float32).itemsize:
        return "the loss has more bits than the product"
    made = _made_for_outputs(head)
    if any(node in head.moves for node in made):
        return "logits that the model returns are reshaped"
    return "" if head.hidden.meta["val"].dim() > 1 else "it has one token"


def _made_for_outputs(head: HeadLoss) -> list[fx.Node]:
    """The logits' nodes that the model's outputs need, in order."""
    needed: list[fx.Node] = []
    for node in reversed((head.product, *head.between)):
        if any(user.op == "output" or user in needed for user in node.users):
            needed.insert(0, node)
    return needed


def chunk_head(graph: OpGraph, head: HeadLoss, chunk: LossChunk) -> None:
    """Let one call make the loss, and another the logits that the model returns."""
    first, edit = (_edit(graph, node, head.product) for node in (head.product, head.loss))
    weight, bias = _tensor(first, head.weight), _tensor(first, head.bias)
    if head.outputs and chunk.logits:
        logits = first.call(evaluation_logits, head.hidden, weight, bias, False)
        set_evaluation(logits, (logits.args, {}))
        set_arguments(logits, (*logits.args[:-1], True), {})
        replace_uses(graph, {head.product: logits}, readers=_made_for_outputs(head))
    else:
        set_outputs(graph, {name: node for name, node in graph.outputs.items() if name not in head.outputs})
    made = _chunk_loss(edit, head, chunk.tokens, weight, bias)
    name = head.loss.name
    edit.replace(head.loss, made)
    made.name = name  # the loss keeps its name in programs
    erase_dead(graph, among={*head.product.all_input_nodes, head.product, *head.between})


def _edit(graph: OpGraph, at: fx.Node, like: fx.Node) -> GraphEdit:
    """An edit before one node, whose new nodes are in the module of another."""
    edit = GraphEdit(graph, at)
    edit.path = str(like.meta["module_path"])
    return edit


def _chunk_loss(edit: GraphEdit, head: HeadLoss, tokens: int, weight: fx.Node | None, bias: fx.Node | None) -> fx.Node:
    """The call that makes the loss."""
    hidden, class_weight = head.hidden, _tensor(edit, head.class_weight)
    chosen = [i for i, move in enumerate(head.moves) if call_name(move) == "getitem"]
    for move in head.moves[: max(chosen, default=-1) + 1]:  # what comes later only reshapes rows, in their order
        hidden = _apply_move(edit, move, hidden)
    options = dict(_options(head, class_weight))
    made = edit.call(chunked_cross_entropy, hidden, weight, bias, head.labels, tokens=tokens, **options)
    return made if made.meta["val"].dtype == head.loss_dtype else edit.call(torch.Tensor.to, made, head.loss_dtype)


def _options(head: HeadLoss, class_weight: fx.Node | None) -> Iterator[tuple[str, Any]]:
    """The arguments of the call that differ from its defaults."""
    rows = (
        ("class_weight", class_weight, None),
        ("ignore_index", head.ignore_index, -100),
        ("reduction", head.reduction, "mean"),
        ("label_smoothing", head.label_smoothing, 0.0),
        ("scale", head.scale, 1.0),
        ("cap", head.cap, None),
    )
    return ((name, value) for name, value, default in rows if value != default)


def _tensor(edit: GraphEdit, held: NodeOrName | None) -> fx.Node | None:
    """The node of an operand; one is made for what a leaf module holds."""
    if held is None or isinstance(held, fx.Node):
        return held
    owner, _, name = held.rpartition(".")
    value = getattr(edit.graph.module.get_submodule(owner), name)
    return edit.parameter(held, value)


def _apply_move(edit: GraphEdit, move: fx.Node, hidden: fx.Node) -> fx.Node:
    """Apply a reshape or an index of the logits to the hidden values."""
    if call_name(move) == "getitem":
        return edit.call(move.target, hidden, *move.args[1:], view_of=hidden, **move.kwargs)
    width = hidden.meta["val"].shape[-1]
    shape = (move.meta.get("dims") or move.meta["val"].shape)[:-1]  # with the names of sizes, where they have some
    return edit.call(torch.Tensor.reshape, hidden, (*shape, width), view_of=hidden)
