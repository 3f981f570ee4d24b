"""`split-context`: the tokens of every sequence are divided among the members of a team (context parallelism).

In: the op graph. Out: the same step as one member of a team runs it. What works token by token works on the member's
own tokens (`graph/follow/tokens.py` proves it), with all weights. Attention is the place where tokens meet:

- `by=heads` (DeepSpeed-Ulysses, 3): an all-to-all gives each member all tokens of its part of the heads; attention is
  the call that it was, with the mask that it had, and another all-to-all brings the results back to tokens. A member
  sends (N-1)/N of the queries, keys, values and results of its own tokens.
- `by=rows`: each member has whole rows of a micro-batch, and none meet. This is as replicas divide a batch, but inside
  a micro-batch, whose tokens then go to experts that members share out.
- `by=ring` (`ring.py`): queries stay, and keys and values go round the members. A member sends N-1 times its keys and
  values. Heads need not divide. If a call is causal, each member has a run of tokens from the front and one from the
  end, so that all have the same work, and blocks that no query sees are left out; with windows alone each has one run,
  and keys and values go only as far as queries see. Of a mask that is a conjunction, what says which keys all queries
  see (padding) stays a number for each key (`graph/masks/allowed_keys.py`).

Layers of experts sort tokens by expert, and give them back in order: each member does so with its own tokens. With
`experts`, members share out the experts, too, and each token goes to the members that have its experts
(`routed_experts.py`); without, each member has them all.

What follows from the batch alone (positions, masks, shifted labels) is computed on whole rows and then cut, by the
device's number in its team, which is an input of the stages that need it. Sums over tokens, as the loss is one, are
summands on each member: the loss of the step is their sum, and the gradient of a weight is the sum over members, as
over lanes. A sum over tokens that more than the loss's last, linear calls read is added up by the team first.

Whatever else lets tokens meet is refused, with the user's line.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import fx

from ...graph.dataflow import Dataflow, shared_nodes
from ...graph.divide.attention import TOKENS, SharedAttention, attention_call
from ...graph.divide.exchanges import copy_written_results, insert_exchange, member_input
from ...graph.divide.local import LocalValues
from ...graph.divide.placements import Has, Placement
from ...graph.divide.ring import AttentionRings
from ...graph.divide.routed_experts import refusal, route_experts
from ...graph.edit import (
    GraphEdit,
    copy_graph,
    erase,
    erase_dead,
    read_instead,
    replace_uses,
    set_arguments,
    set_outputs,
)
from ...graph.experts.layers import ExpertLayer, find_expert_layers
from ...graph.follow.linear import is_linear
from ...graph.follow.tokens import ROW_DIM, TOKEN_DIM, TokenFacts, TokenPlace, TokenWork, sequence_lengths, token_facts
from ...graph.loss.class_loss import class_loss
from ...graph.masks.grouped_heads import heads_before_repeat
from ...graph.operators.calls import unknown_call
from ...graph.operators.states import Kind
from ...graph.opgraph import OpGraph, is_check, is_mode_switch, value_tensors
from ...ir.calls import call_name
from ...ir.errors import PassError
from ...runtime.functions import among_zeros, chunked_cross_entropy, evaluation_logits, own_tokens
from ..decisions import By, Decision, TokenSplit
from ..draft import Draft
from .graph_pass import GraphPass
from .rows_in_parts import refused_by_optimizer

HEADS = 1  # dimension of the operands of attention


@dataclass(frozen=True)
class SplitContext(GraphPass):
    """`by`: how members meet in attention; `team`: their number; `experts`: whether they share out experts, where a
    layer has any; `keep`: whether keys and values that came round a ring are kept until backward.

    Raises `PassError` where tokens meet otherwise, where they or heads cannot be shared out equally, where random
    numbers are drawn for single tokens, and for batches whose sizes are not fixed."""

    name: ClassVar[str] = "split-context"
    rank: ClassVar[int] = 17
    # how tokens are divided among the members of a team
    decides: ClassVar[tuple[Decision, ...]] = (Decision("context", TokenSplit | None, None),)
    by: By = "heads"
    team: int = 2
    experts: bool = True
    keep: bool = False

    def __post_init__(self) -> None:
        if self.by not in get_args(By):
            raise PassError(f"pass {self.name!r}: option by={self.by!r} is none of {', '.join(get_args(By))}")
        if self.team < 2:
            raise PassError(f"pass {self.name!r}: option team={self.team}; a team has at least 2 members")
        if self.keep and self.by != "ring":
            raise PassError(f"pass {self.name!r}: option keep=true; with by={self.by} nothing goes round, use by=ring")

    def plan(self, draft: Draft) -> TokenSplit:
        layers = find_expert_layers(draft.graph) if self.experts else {}
        shared_out = [name for name, layer in layers.items() if not _expert_refusal(draft, layer, self.team)]
        return TokenSplit(team=self.team, by=self.by, experts=shared_out, keep=self.keep)

    def rewrite(self, draft: Draft, decision: TokenSplit) -> None:
        if draft.graph.team > 1:
            raise PassError(f"{self.name}: the work inside layers is divided already, among {draft.graph.team} members")
        graph = copy_graph(draft.graph)
        splitter = _Splitter(graph, decision)
        calls = splitter.run()
        layers = find_expert_layers(graph)
        for name in decision.experts:
            if name not in layers:
                known = ", ".join(layers) or "none"
                raise PassError(f"{self.name}: {name!r} is no layer of experts of this model; it has {known}")
            refused = _expert_refusal(draft, layers[name], decision.team)
            if refused:
                raise PassError(f"{self.name}: the experts of {name} cannot be shared out: {refused}")
            route_experts(graph, layers[name], splitter.member, decision.team, splitter.values, splitter.facts)
        copy_written_results(graph)
        draft.graph = copy_graph(graph)  # over what its nodes read now
        each = f"the {splitter.length} rows" if decision.by == "rows" else f"each sequence of {splitter.length} tokens"
        how = f"; {calls} attention calls by {decision.by}" if calls else ""
        draft.notes[self.name] = f"{graph.team} devices share {each}{how}{_expert_words(draft, layers, decision)}"


def _expert_refusal(draft: Draft, layer: ExpertLayer, team: int) -> str:
    """The reason why members cannot share out a layer's experts; empty where they can."""
    why = (refused_by_optimizer(draft, name, weight) for name, weight in layer.weights.items())
    return refusal(layer, team) or next(filter(None, why), "")


def _expert_words(draft: Draft, layers: Mapping[str, ExpertLayer], decision: TokenSplit) -> str:
    """Say for people which members have which experts."""
    if not layers:
        return ""
    routed = [layers[name] for name in decision.experts]
    told = f"; each has {routed[0].experts // decision.team} of {routed[0].experts} experts" if routed else ""
    told += f", to which tokens go by count, in {len(routed)} layers" if routed else ""
    whole = [name for name in layers if name not in decision.experts]
    if not whole:
        return told
    why = _expert_refusal(draft, layers[whole[0]], decision.team) or "experts=false"
    return f"{told}; each has all experts in {len(whole)} layers ({why})"


def _length(graph: OpGraph) -> int:
    lengths = sequence_lengths(graph)
    if not lengths:
        raise PassError("split-context: no input of the batch is (rows, tokens) or (rows, tokens, features)")
    return lengths[0]


def _rows(graph: OpGraph) -> int:
    """The number of rows of a micro-batch."""
    _length(graph)
    return next(int(value.shape[0]) for value in graph.inputs.values() if value.dim() > 1)


class _Splitter:
    """Rewrites a graph, node by node in order."""

    def __init__(self, graph: OpGraph, decision: TokenSplit):
        self.graph, self.team, self.by = graph, decision.team, decision.by
        if graph.sizes:
            raise PassError(
                f"split-context: the sizes {', '.join(graph.sizes)} differ from batch to batch; pad sequences to one "
                "length, or train without a team"
            )
        self.divided = "rows" if self.by == "rows" else "tokens"
        self.along = ROW_DIM if self.by == "rows" else TOKEN_DIM
        self.length = _rows(graph) if self.by == "rows" else _length(graph)
        self.rings = AttentionRings(graph, self.team, decision.keep) if self.by == "ring" else None
        self.is_zigzag = self.rings is not None and self.rings.is_zigzag
        if self.length % self.pieces:
            near = max(self.pieces, round(self.length / self.pieces) * self.pieces)
            what, near_what = ("rows of a micro-batch", "number") if self.by == "rows" else ("tokens", "length")
            raise PassError(
                f"split-context: {self.length} {what} cannot be shared out equally as {self.pieces} pieces; the "
                f"nearest {near_what} that can is {near}"
            )
        self.facts: TokenFacts = token_facts(graph, self.length, along=self.along)
        self.shared = shared_nodes(graph)
        self.values, self.flow = LocalValues(graph), Dataflow(graph.nodes)
        self.parts: dict[fx.Node, Has] = {}
        self.cuts: dict[tuple[fx.Node, TokenPlace], fx.Node] = {}
        self.calls = 0
        self.used = {node for node in graph.nodes if node.users}

    @property
    def pieces(self) -> int:
        """The number of equal runs of tokens."""
        return 2 * self.team if self.is_zigzag else self.team

    def run(self) -> int:
        """The number of attention calls."""
        self.member = self._member()
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output") or node in self.shared or is_mode_switch(node):
                continue
            if node.op == "get_attr":
                self.parts[node] = Has.WHOLE
            elif node not in self.parts:
                self._take(node)
        self._outputs()
        erase_dead(self.graph, [node for node in self.graph.nodes if node not in self.used])
        self.graph.team, self.graph.apart = self.team, True
        self.graph.graph.lint()
        return self.calls

    def _member(self) -> fx.Node:
        """The input that has the device's number in its team."""
        node = member_input(self.graph)
        self.shared.add(node)
        return node

    # --- one node

    def _take(self, node: fx.Node) -> None:
        has_tokens = any(place is not None for place in self.facts.places.get(node, ()))
        parts = {self.parts[arg] for arg in node.all_input_nodes if arg in self.parts}
        labelled = any(arg in self.shared and self._place(arg) is not None for arg in node.all_input_nodes)
        if Has.PART in parts and node.meta.get("random"):
            self._refuse(node, "draws random numbers for each token, others than for whole rows; set dropout to 0")
        call = attention_call(node) if self.by != "rows" else None
        if call is not None and (Has.PART in parts):
            self._attention(node, call)
        elif Has.SUMMAND in parts:
            self._visit_summands(node)
        elif Has.PART not in parts and not (labelled and has_tokens):
            self.parts[node] = Has.WHOLE
        elif is_check(node):
            self.parts[node] = Has.PART
        elif self.facts.work.get(node) is TokenWork.SORTED:
            self._set_local_order(node)
        elif self.facts.is_token_wise(node) and None not in self.facts.places[node]:
            self._local(node)
        elif node.target is evaluation_logits:
            self._evaluation_logits(node)
        elif (reduction := self._reduction_of_loss(node)) is not None:
            self._class_loss(node, reduction)
        elif node in self.facts.totals and self.parts.get(node.all_input_nodes[0]) is Has.PART:
            self._sum(node)
        else:
            self._refuse(node, f"lets {self.divided} meet")

    def _refuse(self, node: fx.Node, what: str) -> None:
        name, source = call_name(node) or node.target, node.meta.get("source", "")
        if unknown := unknown_call(self.graph, node):
            raise PassError(f"split-context: {unknown}")
        if self.divided == "rows":
            may = "Rows may meet in sums such as the loss alone; train without a team, in one micro-batch"
        else:
            may = "Tokens may meet in attention by scaled_dot_product_attention, and in sums such as the loss; "
            if name == "softmax" or any(kind is Kind.PAIRS for kind, _ in self.facts.met.get(node, ())):
                may += 'use attn_implementation="sdpa", whose attention members can share'
            else:
                may += "train without a team: with tiers and tiles of tokens one device takes longer sequences, too"
            if name == "getitem":
                may += (
                    ". Where a loss leaves the last tokens out (logits[:, :-1]), move its targets instead: "
                    "F.cross_entropy(logits.flatten(0, 1), F.pad(labels[:, 1:], (0, 1), value=-100).flatten())"
                )
        raise PassError(f"split-context: {name} ({source}) {what}. {may}")

    def _place(self, node: fx.Node) -> TokenPlace | None:
        return self.facts.place(node)

    def _local(self, node: fx.Node) -> None:
        """A node that works token by token, on the member's tokens."""
        self._cut_operands(node)
        self._set_local(node, self.facts.places[node])

    def _set_local(self, node: fx.Node, places: Sequence[TokenPlace | None]) -> None:
        """Give a node the value that it has on the member's tokens."""
        wanted = [
            [size // self.team if place is not None and dim == place.dim else size for dim, size in enumerate(t.shape)]
            for t, place in zip(value_tensors(node.meta["val"]), places, strict=True)
        ]
        self.values.set(node, wanted[0] if len(wanted) == 1 else None)
        for tensor, want in zip(value_tensors(node.meta["val"]), wanted, strict=True):
            if list(tensor.shape) != want:
                made = list(tensor.shape)
                self._refuse(node, f"makes {made} of a part of the tokens, where {want} is a part of its result")
        self.parts[node] = Has.PART

    def _set_local_order(self, node: fx.Node) -> None:
        """A node that works on tokens in the order of a permutation, on the member's tokens in theirs."""
        places = [a or b for a, b in zip(self.facts.places[node], self.facts.sorted_places[node], strict=True)]
        sizes = {
            t.shape[place.dim]
            for arg in node.all_input_nodes
            for t, place in zip(value_tensors(arg.meta["val"]), self._places_of(arg))
            if place is not None
        }
        for arg in node.all_input_nodes:  # those of a member are counted from 0
            size = arg.meta["val"].shape[0] if arg.target is torch.arange and len(arg.args) == 1 else None
            if size is not None and size // self.team in sizes and size not in sizes:
                options: dict[str, Any] = dict(arg.kwargs)
                own = GraphEdit(self.graph, arg).call(torch.arange, size // self.team, **options)
                self.shared.add(own)
                read_instead(node, {arg: own})
        self._cut_operands(node)
        self._set_local(node, places)

    def _places_of(self, node: fx.Node) -> tuple[TokenPlace | None, ...]:
        """The place of tokens in each tensor of a value, in order or permuted."""
        own = self.facts.places.get(node, ())
        return tuple(a or b for a, b in zip(own, self.facts.sorted_places.get(node, own), strict=True))

    def _cut_operands(self, node: fx.Node) -> None:
        """Let a node read the member's tokens of what follows from the batch alone."""
        for arg in node.all_input_nodes:
            place = self._place(arg) if arg in self.shared else None
            if place is None or arg is self.member:
                continue
            if (arg, place) not in self.cuts:
                edit = GraphEdit(self.graph, node)
                cut = edit.call(own_tokens, arg, self.member, self.team, place.dim, self.length, *self._how(place))
                self.cuts[arg, place] = cut
                self.shared.add(cut)
            read_instead(node, {arg: self.cuts[arg, place]})

    def _how(self, place: TokenPlace) -> tuple[Any, ...]:
        if self.is_zigzag:
            return place.inner, True
        return (place.inner,) if place.inner != 1 else ()

    # --- sums over tokens

    def _evaluation_logits(self, node: fx.Node) -> None:
        """Logits that evaluation alone makes, token by token; in training they have no rows."""
        hidden = node.args[0]
        assert isinstance(hidden, fx.Node)
        if self._place(hidden) is None or self.parts.get(hidden) is not Has.PART:
            self._refuse(node, "has tokens in no place that is known")
        self.values.set(node)
        self.parts[node], self.facts.places[node] = Has.PART, self.facts.places[hidden]

    def _reduction_of_loss(self, node: fx.Node) -> str | None:
        """The reduction by which a loss of classes puts its tokens together; None for another call."""
        if node.target is chunked_cross_entropy:
            bound = inspect.signature(chunked_cross_entropy).bind(*node.args, **node.kwargs)
            bound.apply_defaults()
            return str(bound.arguments["reduction"])
        call = class_loss(self.graph, node)
        return None if call is None else call.reduction

    def _class_loss(self, node: fx.Node, reduction: str) -> None:
        if reduction == "none":
            self._refuse(node, "gives a loss for each token in another place than its own")
        if reduction == "mean":
            self._refuse(node, "takes the mean over what the tokens at hand count; sum it, and divide by a count")
        self._cut_operands(node)
        self.values.set(node)
        self.parts[node] = Has.SUMMAND

    def _sum(self, node: fx.Node) -> None:
        self.values.set(node)
        self.parts[node] = Has.SUMMAND
        if self.facts.totals[node] == "mean":
            self._divide_by_team(node)

    def _divide_by_team(self, node: fx.Node) -> fx.Node:
        """Let the readers of a value read its N-th part."""
        after = GraphEdit(self.graph, node, after=True)
        made = after.call(operator.truediv, node, self.team)
        replace_uses(self.graph, {node: made})
        self.parts[made] = Has.SUMMAND
        return made

    def _visit_summands(self, node: fx.Node) -> None:
        """A node that reads summands: linear in them, it gives one; else the team adds them up first."""
        if any(self.parts.get(arg) is Has.PART for arg in node.all_input_nodes):
            self._refuse(node, f"lets {self.divided} meet")
        summands = [arg for arg in node.all_input_nodes if self.parts.get(arg) is Has.SUMMAND]
        if is_linear(self.graph, node, summands) or self._share_addends(node, summands):
            self.parts[node] = Has.SUMMAND
            return
        if node.meta["mutates"]:
            self._refuse(node, f"changes in place what {self.divided} sum to")
        for arg in summands:
            whole = insert_exchange(GraphEdit(self.graph, node), arg, Placement.SUMMAND, Placement.SHARED, self.team)
            self.parts[whole] = Has.WHOLE
            read_instead(node, {arg: whole})
        self.parts[node] = Has.WHOLE

    def _share_addends(self, node: fx.Node, summands: Sequence[fx.Node]) -> bool:
        """Let each member add its N-th part of what all have to a summand; whether a node is a sum of the two."""
        if len(node.args) != 2 or node.kwargs or not is_linear(self.graph, node, node.all_input_nodes, offset=True):
            return False
        for arg in node.all_input_nodes:
            if arg not in summands:
                read_instead(node, {arg: GraphEdit(self.graph, node).call(operator.truediv, arg, self.team)})
        args = (arg / self.team if isinstance(arg, (int, float)) else arg for arg in node.args)
        set_arguments(node, tuple(args), node.kwargs)
        return True

    # --- attention

    def _attention(self, node: fx.Node, call: SharedAttention) -> None:
        self.calls += 1
        operands = [call.query, call.key, call.value]
        for operand in operands:
            place = self._place(operand)
            if self.parts.get(operand) is not Has.PART or operand.meta["val"].dim() != 4:
                self._refuse(node, "has operands that are not (rows, heads, tokens, width) with a member's own tokens")
            if place != TokenPlace(TOKENS):
                self._refuse(node, f"has its tokens in another dimension of {operand.name} than {TOKENS}")
            if any(self.flow.order[writer] > self.flow.order[node] for writer in self.flow.writers(operand)):
                self._refuse(node, f"has an operand, {operand.name}, that is changed in place after it")
        for mask in call.masks:
            if self.parts.get(mask, Has.WHOLE) is not Has.WHOLE:
                self._refuse(node, "has a mask that the model computes of its tokens")
        if self.by == "ring":
            self._write_ring(node, call)
        else:
            self._exchange_heads(node, call)

    def _exchange_heads(self, node: fx.Node, call: SharedAttention) -> None:
        heads = call.query.meta["val"].shape[HEADS]
        if heads % self.team:
            near = [n for n in range(2, heads + 1) if heads % n == 0]
            self._refuse(node, f"has {heads} heads, which {self.team} members cannot share; teams that can: {near}")
        edit = GraphEdit(self.graph, node)
        for operand in dict.fromkeys([call.query, call.key, call.value]):
            read_instead(node, {operand: self._to_heads(node, edit, operand, heads)})
        for mask in call.masks:
            shape = mask.meta["val"].shape
            if len(shape) > 2 and shape[-3] not in (1, heads):
                self._refuse(node, f"has a mask {list(shape)} for {heads} heads")
            if len(shape) > 2 and shape[-3] == heads > 1:
                own = edit.call(own_tokens, mask, self.member, self.team, len(shape) - 3, heads)
                self.parts[own] = Has.WHOLE
                read_instead(node, {mask: own})
        self.values.set(node)
        self.parts[node] = Has.PART
        after = GraphEdit(self.graph, node, after=True)
        back = insert_exchange(after, node, Placement.PART, Placement.PART, self.team, TOKENS, HEADS)
        replace_uses(self.graph, {node: back})
        self.parts[back], self.facts.places[back] = Has.PART, (TokenPlace(TOKENS),)

    def _to_heads(self, node: fx.Node, edit: GraphEdit, operand: fx.Node, heads: int) -> fx.Node:
        """All tokens of the member's part of the heads of a query, key or value. Of keys and values that are repeated
        for several heads each, those before that move."""
        given, repeats = heads_before_repeat(operand)
        if given not in self.parts or given.meta["val"].shape[HEADS] % self.team:
            given, repeats = operand, 1
        own = int(given.meta["val"].shape[HEADS])
        before = self.team // math.gcd(own, self.team)  # as often as the members can share them
        if heads % (own * before):
            self._refuse(node, f"has {own} heads of keys and values, which {self.team} members cannot share")
        if before > 1:
            given = edit.call(torch.repeat_interleave, given, before, HEADS)
            self.parts[given] = Has.PART
        moved = insert_exchange(edit, given, Placement.PART, Placement.PART, self.team, HEADS, TOKENS)
        self.parts[moved] = Has.PART
        if repeats == 1:
            return moved
        repeated = edit.call(torch.repeat_interleave, moved, repeats, HEADS)
        self.parts[repeated] = Has.PART
        return repeated

    def _write_ring(self, node: fx.Node, call: SharedAttention) -> None:
        assert self.rings is not None
        refusal = self.rings.refusal(node)
        if refusal:
            self._refuse(node, refusal)
        made, masks = self.rings.write(node, call, self.member, self.parts.keys())
        self.shared.update(masks)
        replace_uses(self.graph, {node: made})
        self.parts[made], self.facts.places[made] = Has.PART, (TokenPlace(TOKENS),)
        erase(self.graph, [node])

    # --- the graph

    def _outputs(self) -> None:
        """The step's results: the loss, and other outputs whole."""
        outputs = dict(self.graph.outputs)
        for name, node in self.graph.outputs.items():
            part = self.parts.get(node)
            if part is None or (part is Has.WHOLE and name != "loss"):
                continue  # of the batch alone, or the same on all members
            made = node
            if part is Has.WHOLE:
                made = GraphEdit(self.graph, made, after=True).call(operator.truediv, made, self.team)
            elif part is Has.PART:
                place = self._place(node)
                if place is None:
                    raise PassError(f"split-context: the output {name!r} has tokens in no place that is known")
                args = (self.member, self.team, place.dim, self.length, *self._how(place))
                made = GraphEdit(self.graph, made, after=True).call(among_zeros, made, *args)
            after = GraphEdit(self.graph, made, after=True)
            made = insert_exchange(after, made, Placement.SUMMAND, Placement.WHOLE, self.team)
            self.parts[made] = Has.WHOLE
            outputs[name] = made
        set_outputs(self.graph, outputs)
