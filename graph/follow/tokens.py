"""Find the places of a sequence's tokens in every value of an op graph, and the nodes that work token by token.

In: an op graph, and the length of its sequences. Out: `TokenFacts`. The rules are those of rows (`operators/`):
tokens are along a dimension as rows are, only along another one of the inputs. A node is token-wise if each element of
its results depends on elements of one token alone, beside values without tokens, so that it may run on any part of the
tokens: a tile of them in turn, or those that one device has. Where tokens meet, as in attention, following begins anew
with the node's results: their tokens are where those of an operand are, or along their only dimension of that length.

A place by length alone is a label, not a proof of whose token an element is. Nodes that are proven token-wise keep
whatever labels their operands have, so that what runs on parts of these gives the same parts of the results.

What is sorted by something else, as a router sorts tokens by expert, is followed through the permutation until it is
undone. Such nodes are token-wise together, not one by one: on some tokens alone they give what belongs to these.

Rows of the batch are followed in the same way, along dimension 0 of the inputs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..kernels.cuda_autocast import autocast_as
from ..operators.calls import unread_operand
from ..operators.states import ByRow, Free, Mixed, OverRows, Permutation, RowState, whole
from ..opgraph import OpGraph, value_tensors
from .engine import Effect, Follower, Met
from .linear import REDUCTIONS, is_linear

ROW_DIM, TOKEN_DIM = 0, 1  # of inputs


class TokenWork(enum.Enum):
    """The ways in which nodes work on tokens."""

    WISE = "token-wise"  # each element of its results depends on one token
    SORTED = "sorted"  # its operands or its results have tokens in the order of a permutation that is undone later
    MIXES = "mixes"  # tokens meet, change places, or are told apart by their number
    WITHOUT = "without"  # neither its operands nor its results have tokens: parameters, constants and what they make


@dataclass(frozen=True)
class TokenPlace:
    """The place of tokens in a tensor: element i along `dim` is of token `i // inner % length`."""

    dim: int
    inner: int = 1

    def is_plain(self, shape: Sequence[int], length: int) -> bool:
        """Whether tokens are one after the other along `dim`, so that a slice of it holds a run of them: not where rows
        and tokens share the dimension."""
        return shape[self.dim] == self.inner * length


@dataclass(frozen=True)
class TokenFacts:
    """`length`: the number of tokens of a sequence. `places`: for each node the place of the tokens in each tensor of
    its value, in order; None for a tensor without tokens. `work`: what each node does with them. `met`: in what ways
    tokens met in a node that mixes, and in which operators of torch, as far as rules can tell. `totals`: "sum" or
    "mean" for each node that reduces one value over tokens so. `joined`: the nodes with a result each of whose elements
    depends on several tokens."""

    length: int
    places: dict[fx.Node, tuple[TokenPlace | None, ...]] = field(default_factory=dict)
    work: dict[fx.Node, TokenWork] = field(default_factory=dict)
    met: dict[fx.Node, tuple[Met, ...]] = field(default_factory=dict)
    totals: dict[fx.Node, str] = field(default_factory=dict)
    sorted_places: dict[fx.Node, tuple[TokenPlace | None, ...]] = field(default_factory=dict)
    joined: set[fx.Node] = field(default_factory=set)

    def place(self, node: fx.Node) -> TokenPlace | None:
        """The place of the tokens in a node's tensor; None where it has none, or where its value is no single one."""
        found = self.places.get(node, ())
        return found[0] if len(found) == 1 else None

    def is_token_wise(self, node: fx.Node) -> bool:
        return self.work.get(node) is TokenWork.WISE


def sequence_lengths(graph: OpGraph) -> list[int]:
    """The lengths of the sequences that enter the graph, the longest first: the sizes of the second dimension of inputs
    that are (rows, tokens) of whole numbers, or (rows, tokens, features). Two for an encoder and a decoder whose
    sequences differ."""
    rows = [value for value in graph.inputs.values() if value.dim() == (3 if value.is_floating_point() else 2)]
    sizes = {value.shape[1] for value in rows}
    return sorted((int(size) for size in sizes if size > 1), reverse=True)


def token_facts(graph: OpGraph, length: int, device_kind: str = "cpu", along: int = TOKEN_DIM) -> TokenFacts:
    """Follow the tokens of sequences of this length through the graph, or what else is `along` a dimension of its
    inputs. Nothing is computed: values are fake tensors, and equal calls are run once."""
    facts = TokenFacts(length)
    follower = _TokenFollower(graph, facts, along)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), autocast_as(device_kind, graph.autocast):
        for node in graph.nodes:
            if node.op != "output":
                follower.node(node)
    return facts


class _TokenFollower(Follower):
    """Follows tokens along a dimension of the inputs."""

    def __init__(self, graph: OpGraph, facts: TokenFacts, along: int):
        super().__init__(graph, facts.length, None)
        self.facts, self.along = facts, along
        self.parameters = graph.parameters()
        self.weights = set[fx.Node]()  # parameters, and what is made of them alone

    def entering(self, name: str, tensor: torch.Tensor) -> RowState:
        if tensor.dim() > self.along and tensor.shape[self.along] == self.rows and name not in self.counted:
            return ByRow(dim=self.along)
        return Free(varies=whole(range(tensor.dim())))

    def settle(self, node: fx.Node, tensors: Sequence[torch.Tensor], effect: Effect) -> Effect:
        made_of = node.all_input_nodes
        operands = [t for n in made_of for t in value_tensors(n.meta["val"]) if isinstance(self.state(t), ByRow)]
        is_parameter = node.op == "get_attr" and str(node.target) in self.parameters
        if is_parameter or (made_of and self.weights.issuperset(made_of)):
            self.weights.add(node)
        states = tuple(effect.states)
        if not effect.met and self._is_sorted(node, tensors, states):
            self._note_sorted_places(node, states)
            return replace(effect, states=states, met=())
        kept = not effect.met and all(isinstance(state, ByRow) and state.order is None for state in states)
        if not kept:
            states = tuple(self._anew(node, t, s, operands) for t, s in zip(tensors, states, strict=True))
        with_tokens = [isinstance(state, ByRow) for state in states]
        is_constant = not effect.met and all(with_tokens) and self._is_constant(node, effect.states)
        if node.op == "placeholder" or ((kept or is_constant) and operands and with_tokens):
            work = TokenWork.WISE
        elif operands or any(with_tokens):
            work = TokenWork.MIXES
            self.facts.met[node] = effect.met
            if any(isinstance(state, Mixed | OverRows) for state in effect.states):
                self.facts.joined.add(node)
            self._note_total(node, effect)
        else:
            work = TokenWork.WITHOUT
        self.facts.work[node] = work
        self.facts.places[node] = tuple(TokenPlace(s.dim, s.inner) if isinstance(s, ByRow) else None for s in states)
        return replace(effect, states=states, met=())

    def _note_total(self, node: fx.Node, effect: Effect) -> None:
        """Note whether a node reduces one value over tokens."""
        powers = [state.scale.power for state in effect.states if isinstance(state, OverRows)]
        is_of_one = len(powers) == len(node.all_input_nodes) == 1 and not effect.met
        if is_of_one and powers[0] in REDUCTIONS and is_linear(self.graph, node, node.all_input_nodes):
            self.facts.totals[node] = REDUCTIONS[powers[0]]

    def _is_constant(self, node: fx.Node, states: Sequence[RowState]) -> bool:
        """Whether a value has no more of its operand than its shape."""
        return all(isinstance(state, Free) for state in states) and unread_operand(self.graph, node) is not None

    def _is_sorted(self, node: fx.Node, tensors: Sequence[torch.Tensor], states: Sequence[RowState]) -> bool:
        """Whether a node works on tokens in the order of a permutation, or finds one, or restores the tokens' own."""
        if node.op in ("placeholder", "get_attr", "output"):
            return False
        given = [self.state(t) for n in node.all_input_nodes for t in value_tensors(n.meta["val"])]
        if any(isinstance(state, Mixed) for state in states):
            return False
        return any(map(_is_permuted, given)) or any(isinstance(s, Permutation) for s in states)

    def _note_sorted_places(self, node: fx.Node, states: Sequence[RowState]) -> None:
        places = [TokenPlace(s.dim, s.inner) if isinstance(s, ByRow | Permutation) else None for s in states]
        if self._is_constant(node, states):  # it has the place of its operand
            like = self.state(node.all_input_nodes[0].meta["val"])
            places = [TokenPlace(like.dim, like.inner) if isinstance(like, ByRow | Permutation) else None]
        in_order = [isinstance(s, ByRow) and s.order is None for s in states]
        self.facts.work[node] = TokenWork.SORTED
        self.facts.places[node] = tuple(p if own else None for p, own in zip(places, in_order))
        self.facts.sorted_places[node] = tuple(None if own else p for p, own in zip(places, in_order))

    def _anew(self, node: fx.Node, tensor: torch.Tensor, state: RowState, operands: Sequence[torch.Tensor]) -> RowState:
        """The state of a result with which following begins anew."""
        if node in self.weights:
            return state
        for operand in operands:
            before = self.state(operand)
            assert isinstance(before, ByRow)
            if operand.dim() == tensor.dim() and operand.shape[before.dim] == tensor.shape[before.dim]:
                return ByRow(dim=before.dim, inner=before.inner)
        along = [dim for dim, size in enumerate(tensor.shape) if size == self.rows]
        if self.along == ROW_DIM:  # a few rows: many a dimension is as long
            along = [0] if 0 in along and tensor.dim() > 1 and node.op != "get_attr" else []
        if len(along) == 1:
            return ByRow(dim=along[0])
        return state if isinstance(state, Free) else Free(varies=whole(range(tensor.dim())))


def _is_permuted(state: RowState) -> bool:
    """Whether a value has tokens in another order, says in which, or counts them: only of sorted tokens a count is
    followed."""
    return isinstance(state, Permutation | OverRows) or (isinstance(state, ByRow) and state.order is not None)
