"""`drop-masks`: attention without the masks that its kernels know by themselves.

In: the op graph. Out: a graph in which `scaled_dot_product_attention` gets no mask where its mask is proven to show
every key, every key up to the query's place, or a window around it. A call with a mask cannot run flash attention and
keeps the mask, which is as large as all pairs of a query and a key; without one, keys that each serve several heads of
queries need no copies, either (`grouped_heads.py`). Masks that keep documents of a row apart go on
GPUs: the kernel for sequences of any length takes the borders of documents where it can, else blocks of queries have
masks made of the documents' numbers. Other masks that depend on the batch (padding), on parameters or on buffers
stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from ...graph.edit import GraphEdit, change_arguments, copy_graph, erase_dead
from ...graph.masks.calls import form_of, given_arguments, is_scored, weighs
from ...graph.masks.documents import counted_input, documents_of
from ...graph.masks.forms import DocumentBorders, KeyWindow, MaskForm
from ...graph.masks.grouped_heads import drop_repeats
from ...graph.masks.intervals import Intervals
from ...graph.masks.visible import visible_keys
from ...graph.opgraph import OpGraph
from ...ir.calls import call_name
from ...ir.errors import PassError
from ...runtime.functions import MOST_QUERIES, document_borders, packed_attention, window_attention
from ...runtime.functions.document_borders import MOST_DOCUMENTS, fits_kernel
from ..decisions import Decision
from ..draft import Draft
from .graph_pass import GraphPass

# Places of a row from which on blocks win: two blocks of queries leave out a quarter of all pairs, which makes up for
# the attention that backward computes again.
LEAST_PACKED = 2 * MOST_QUERIES
# A row has room for documents of this number of tokens on average, for twice the documents of the fullest row of the
# example batch, or for a few. Each takes the kernel's backward 128 tokens' gradients of queries in fp32.
MEAN_DOCUMENT = 64
FEW_DOCUMENTS = 8


@dataclass(frozen=True)
class DropMasks(GraphPass):
    name: ClassVar[str] = "drop-masks"
    rank: ClassVar[int] = 10
    everywhere: ClassVar[bool] = True
    # place of an attention call -> the proven form of a mask that it goes without
    decides: ClassVar[tuple[Decision, ...]] = (Decision("masks", dict[str, MaskForm], {}, hashed=True),)

    def plan(self, draft: Draft) -> dict[str, MaskForm]:
        """The proven form of the mask of each call, by the call's place. Masks of documents go on GPUs where the
        kernel takes borders, and in rows so long that blocks of queries take no more time than one mask for all
        calls."""
        calls, found = masked_calls(draft.graph), dict(draft.graph.once(_proven))
        is_cpu, knows_borders = draft.machine.devices[0].kind == "cpu", has_flash(draft)
        for place in [place for place, form in found.items() if form == "documents"]:
            borders = _borders(draft.graph, calls[place]) if knows_borders else None
            if is_cpu:
                del found[place]
            elif borders is not None:
                found[place] = borders
            elif calls[place].meta["val"].shape[-2] < LEAST_PACKED:
                del found[place]
        return found

    def rewrite(self, draft: Draft, decision: dict[str, MaskForm]) -> None:
        told = _remarks(len(masked_calls(draft.graph)), list(decision.values()), written_out(draft.graph))
        if told:
            draft.notes[self.name] = "; ".join(told)
        if not decision:
            return
        graph = copy_graph(draft.graph)
        calls = masked_calls(graph)
        for place in decision:
            if place not in calls:
                known = ", ".join(calls) or "none"
                raise PassError(f"masks names {place!r}; the model's attention calls with a mask are {known}")
        forms = draft.graph.once(_proven)
        borders: dict[fx.Node, fx.Node] = {}
        for place, form in decision.items():
            if not _agrees(graph, calls[place], form, forms.get(place)):
                found = f"is proven to be {_text_of(forms[place])}" if place in forms else "is not proven to be that"
                raise PassError(
                    f"masks says that the mask of {place} is {_text_of(form)}, but it {found}; "
                    "leave the entry out to keep the mask"
                )
            _rewrite(graph, calls[place], form, borders)
            on_gpu = draft.machine.devices[0].kind != "cpu"
            if form in ("all", "causal") and (has_flash(draft) or not on_gpu):
                drop_repeats(graph, calls[place], on_gpu)
        erase_dead(graph)  # what made the masks
        draft.graph = graph


def has_flash(draft: Draft) -> bool:
    """Whether all devices have flash attention as CUDA has it."""
    return all("bf16" in device.peak_flops for device in draft.machine.devices) and not torch.version.hip


def masked_calls(graph: OpGraph) -> dict[str, fx.Node]:
    """The attention calls with a mask, by place: the path of the user's module that makes the call."""
    found: dict[str, fx.Node] = {}
    uses: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is F.scaled_dot_product_attention:
            path = str(node.meta.get("module_path", "")) or node.name
            uses[path] = uses.get(path, 0) + 1
            if isinstance(given_arguments(node.args, node.kwargs).get("attn_mask"), fx.Node):
                found[path if uses[path] == 1 else f"{path}#{uses[path]}"] = node
    return found


def _proven(graph: OpGraph) -> dict[str, MaskForm]:
    """The forms of the masks for which there is a proof, by the place of the call."""
    known: dict[fx.Node, Intervals | None] = {}
    packed: dict[fx.Node, bool] = {}
    found: dict[str, MaskForm] = {}
    for place, node in masked_calls(graph).items():
        given = given_arguments(node.args, node.kwargs)
        mask = given["attn_mask"]
        evaluation = given_arguments(node.meta.get("eval_args", node.args), node.meta.get("eval_kwargs", node.kwargs))
        if evaluation["attn_mask"] != mask or given.get("is_causal"):
            continue
        if mask not in known:
            known[mask] = visible_keys(graph, mask)
            packed[mask] = known[mask] is None and documents_of(graph, mask) is not None
        seen, query = known[mask], given["query"].meta["val"]
        queries, keys = query.shape[-2], given["key"].meta["val"].shape[-2]
        form = form_of(seen, queries, keys)
        if packed[mask] and queries == keys and query.dim() == 4:
            form = "documents"
        if form is not None:
            found[place] = form
    return found


def _borders(graph: OpGraph, node: fx.Node) -> DocumentBorders | None:
    """The room for documents of a call whose mask tells them apart, if the kernel takes the call as it is."""
    given = given_arguments(node.args, node.kwargs)
    query, key, value = (given[name].meta["val"] for name in ("query", "key", "value"))
    if graph.autocast is not None:
        query, key, value = (operand.to(graph.autocast) for operand in (query, key, value))
    documents, (rows, length) = documents_of(graph, given["attn_mask"]), (query.shape[0], query.shape[-2])
    positions = "" if documents is None else counted_input(graph, documents, rows)
    if not positions or given.get("dropout_p") or not fits_kernel(query, key, value):
        return None
    most = rows * min(length, max(FEW_DOCUMENTS, 1 + length // MEAN_DOCUMENT, 2 * graph.packed))
    return DocumentBorders(most=int(most), positions=positions) if most <= MOST_DOCUMENTS else None


def _agrees(graph: OpGraph, node: fx.Node, form: MaskForm, proven: MaskForm | None) -> bool:
    """Whether a call may go without its mask in this form; room for another number of documents is the user's."""
    if not isinstance(form, DocumentBorders):
        return form == proven
    found = _borders(graph, node) if proven == "documents" else None
    return found is not None and found.positions == form.positions and form.most <= MOST_DOCUMENTS


def _rewrite(graph: OpGraph, node: fx.Node, form: MaskForm, borders: dict[fx.Node, fx.Node]) -> None:
    """`borders`: those of documents that earlier calls had."""
    more: dict[str, Any] = {}
    documents = None
    if form == "documents" or isinstance(form, DocumentBorders):
        documents = documents_of(graph, given_arguments(node.args, node.kwargs)["attn_mask"])
        assert documents is not None
        node.target = packed_attention
    if documents is not None and isinstance(form, DocumentBorders):
        if documents not in borders:
            edit = GraphEdit(graph, node)
            edit.path = str(documents.meta["module_path"])
            borders[documents] = edit.call(document_borders, documents, form.most)
            borders[documents].meta["source"] = ""  # no line of the user's
        more = {"borders": borders[documents]}
    change_arguments(node, lambda args, kwargs: _drop_mask(args, kwargs, form, documents, more))
    if isinstance(form, KeyWindow):
        node.target = window_attention


def _drop_mask(
    args: Sequence[Any], kwargs: dict[str, Any], form: MaskForm, documents: fx.Node | None, more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    given = given_arguments(args, kwargs)
    operands = tuple(given.pop(name) for name in ("query", "key", "value"))
    rest = {name: value for name, value in given.items() if name not in ("attn_mask", "is_causal")} | more
    if isinstance(form, KeyWindow):
        return (*operands, form.before, form.after), rest
    if documents is not None:
        return (*operands, documents), rest
    return operands, {**rest, "is_causal": True} if form == "causal" else rest


def _text_of(form: MaskForm) -> str:
    if isinstance(form, KeyWindow):
        return f"a window of {form.before + 1 + form.after} keys"
    if isinstance(form, DocumentBorders):
        return f"causal in each document, of at most {form.most} in a micro-batch"
    return {"all": "all ones", "causal": "causal", "documents": "causal in each document"}[form]


def written_out(graph: OpGraph) -> int:
    """The number of softmaxes between two batched products: attention that the model writes out itself, of which no
    kernel is told."""
    return sum(weighs(graph, node) and is_scored(graph, node) for node in graph.nodes if call_name(node) == "softmax")


def _remarks(count: int, forms: Sequence[MaskForm], written: int) -> list[str]:
    words = [_text_of(form) for form in forms]
    kinds = list(dict.fromkeys(words))
    told = [f"attention calls that need no mask, as it is {' or '.join(kinds)}: {len(forms)}"] if kinds else []
    if count > len(forms):
        reason = "" if kinds else ": it is not proven that they follow from places alone"
        told.append(f"the masks of {count - len(forms)} {'others' if kinds else 'attention calls'} stay{reason}")
    if written:
        told.append(f"attention that the model writes out as products and a softmax, with its masks: {written}")
    return told
