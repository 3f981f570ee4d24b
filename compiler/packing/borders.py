"""Batches that hold several documents in a row, without attention across their borders.

transformers' models take the borders from `position_ids`, which begin anew with each document. Its collator
`DataCollatorWithFlattening` may give the borders in other forms, too: for flash attention, whose numbers are others in
each batch, and for recurrent layers.

In: a batch of the user. Out: the same with `Unread` in place of what is other in each batch and must not become part
of a program; errors where tokens would attend across borders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from torch import Tensor

from ...graph.masks.followers import meeting_nodes
from ...graph.opgraph import OpGraph
from ...ir.errors import PlanError
from ...runtime.torch_names import FakeTensor
from .varying_inputs import Unread

OF_FLASH_ATTENTION = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
POSITIONS = "position_ids"
_BORDERS = (*OF_FLASH_ATTENTION, "seq_idx")
_SILENT = ("input_ids", "attention_mask", "labels")  # on where documents end


def with_unread(batch: Any) -> Any:
    """The batch with `Unread` in place of flash attention's numbers."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch or not any(n in batch for n in OF_FLASH_ATTENTION):
        return batch
    return {name: Unread(name) if name in OF_FLASH_ATTENTION else value for name, value in batch.items()}


def require_positions(example_inputs: Any) -> None:
    """Raise `PlanError` for a packed batch that gives the borders of its documents in other forms only."""
    if not isinstance(example_inputs, Mapping) or "input_ids" not in example_inputs or POSITIONS in example_inputs:
        return
    found = [name for name in _BORDERS if name in example_inputs]
    if found:
        raise PlanError(
            f"example_inputs has {', '.join(found)}, but no {POSITIONS!r}: tokens would attend across the borders of "
            "documents. Let the collator give it: DataCollatorWithFlattening(return_position_ids=True), or "
            "penstock.pack_documents"
        )


def has_positions(shape: Mapping[str, Any]) -> bool:
    """Whether batches of these shapes and types may have positions that begin anew with each document."""
    return POSITIONS in shape and shape[POSITIONS] == shape.get("input_ids")


def most_documents(batch: Any) -> int:
    """The most documents in a row, which positions that begin anew tell apart; 0 where none does so between tokens that
    the row's mask shows."""
    if not isinstance(batch, Mapping):
        return 0
    positions, ids = batch.get(POSITIONS), batch.get("input_ids")
    if not (_is_known(positions) and isinstance(ids, Tensor) and ids.dim() == 2):
        return 0
    if positions.shape != ids.shape:
        return 0
    begins = positions.diff(dim=-1) != 1
    mask = batch.get("attention_mask")
    if mask is not None:
        if not (_is_known(mask) and mask.shape == ids.shape):
            return 0  # a mask of the user's own, of all pairs
        begins &= (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return int(begins.sum(-1).max()) + 1 if bool(begins.any()) else 0


def _is_known(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.device.type != "meta"


def require_borders(graph: OpGraph) -> None:
    """Raise `PlanError` where tokens of a packed batch reach others across the borders of documents."""
    reason = open_border(graph)
    if reason:
        raise PlanError(f"example_inputs[{POSITIONS!r}] {reason}")


def open_border(graph: OpGraph) -> str:
    """The reason to refuse a packed batch: where tokens reach others across the borders of documents, and what is
    allowed. "" where none does."""
    begins = "begins anew inside of rows, where another document begins, but"
    silent = (*_SILENT, *graph.loss.rules.names)
    telling = [name for name in graph.inputs if name not in silent]  # a model may have an input of its own
    contents = {name for name, value in graph.inputs.items() if value.is_floating_point()} | {"input_ids", "labels"}
    meeting = meeting_nodes(graph, telling, contents - {"attention_mask"}, graph.inputs["input_ids"].shape[1])
    others = [node for node, is_attention in meeting.items() if not is_attention]
    if others:
        module = f"{others[0].meta.get('module_path') or 'the model'} ({others[0].meta.get('module_type')})"
        return (
            f"{begins} tokens of one document reach the next in {module}, at {others[0].meta.get('source')}: of all "
            "that joins tokens, only attention by a mask is known to end with a document. Allowed: one document "
            "in a row"
        )
    places = list(dict.fromkeys(str(node.meta.get("module_path", "")) or node.name for node in meeting))
    if places:
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        without = "leave 'attention_mask' out of the batch, as transformers' models find documents only without one; "
        return (
            f"{begins} the attention of {places[0]}{more} sees across: its mask does not follow from {POSITIONS!r}. "
            f"Allowed: {without if 'attention_mask' in graph.inputs else ''}an 'attention_mask' of booleans "
            "[rows, 1, queries, keys] that shows each token its own document; one document in a row"
        )
    if not any(node.users for node in graph.nodes if node.op == "placeholder" and node.name in telling):
        return f"{begins} the model does not read {POSITIONS!r}: put one document into a row"
    return ""
