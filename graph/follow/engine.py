"""Follows rows through an op graph: each node is run on fake tensors, and every operator of torch that it calls has a
rule for what it does to rows. Equal calls are run once.

In: an op graph, the number of rows of its micro-batch. Out: the state of the loss, and where rows met on the way.
"""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from ...ir.calls import function_name
from ...runtime.functions.chosen import gradient_if
from ...runtime.stage.operators import written_tensors
from ...runtime.torch_names import TorchDispatchMode
from ..dataflow import Dataflow
from ..kernels.call_node import call_node
from ..kernels.cuda_autocast import autocast_as
from ..operators.calls import call_key
from ..operators.contractions import added_product, bilinear, convolution, matrices
from ..operators.pointwise import add, choose, elementwise, multiply
from ..operators.record import (
    UNKNOWN,
    Elements,
    RowCall,
    constants,
    is_pointwise,
    nonlinear,
    operator_name,
    plain,
    record_name,
)
from ..operators.states import (
    ANY_STEP,
    ONE,
    ByRow,
    Free,
    Kind,
    Mixed,
    OneRow,
    RowState,
    Scale,
    differs,
    gradient_state,
    whole,
)
from ..operators.table import operator_of
from ..opgraph import OpGraph, is_mode_switch, value_tensors
from .constants import ConstantValues, attention_mask, is_same_in_rows

_BY_SCALE = (add, choose, matrices, added_product, bilinear, convolution)  # rules that look at operands' scales
Met = tuple[Kind, str]  # in what way rows met, and in which operator of torch


@dataclass
class Trail:
    """The results of following. `met` has the ways in which rows met at each node, `reaching` the nodes of these that
    the loss depends on, `numbers` the plain numbers that each node multiplied by of those that the loss is made of,
    `by_rows` the nodes that write what rows influence into buffers.
    `is_clear`: False where one row was too few to tell what happens."""

    loss: RowState = field(default_factory=Free)
    met: dict[fx.Node, list[Met]] = field(default_factory=dict)
    reaching: frozenset[fx.Node] = frozenset()
    numbers: dict[fx.Node, Sequence[float]] = field(default_factory=dict)
    by_rows: frozenset[fx.Node] = frozenset()
    is_clear: bool = True

    def has_calls_of(self, other: Trail) -> bool:
        """Whether the loss is made by the same calls, in the same order."""
        ours, theirs = (
            [(name_of_call(node), len(row)) for node, row in each.numbers.items()] for each in (self, other)
        )
        return ours == theirs

    @property
    def calls(self) -> frozenset[str]:
        """The names of the calls that make the loss."""
        return frozenset(name_of_call(node) for node in self.numbers if node.op.startswith("call"))


# By node, of each number: its growth with the number of rows, None if irregular.
Powers = Mapping[fx.Node, Sequence[float | None]]


def name_of_call(node: fx.Node) -> str:
    """The name of what a node calls, as a method or as a function; an autograd function is another in each trace."""
    return function_name(node.target, str(node.target))


def follow(graph: OpGraph, rows: int, powers: Powers | None = None, device_kind: str = "cpu") -> Trail:
    """Follow `rows` rows through the graph. Without `powers` the scale of what was multiplied by a number is unsure."""
    follower = Follower(graph, rows, powers)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), autocast_as(device_kind, graph.autocast):
        for node in graph.nodes:
            if node.op != "output":
                follower.node(node)
    return follower.trail(graph.outputs["loss"])


def keeps_rows(graph: OpGraph, nodes: Sequence[fx.Node], given: Set[fx.Node], rows: int) -> fx.Node | None:
    """The first of `nodes` of which a row does not follow from the same row of what they read: `given` have a row for
    each of `rows` along dimension 0, all other values that enter are the same for all rows. None where all do."""
    follower = Follower(graph, rows, None)
    for node in given:
        for tensor in value_tensors(node.meta["val"]):
            follower.states[id(tensor)] = ByRow(dim=0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in nodes:
            follower.node(node)
            states = (follower.state(tensor) for tensor in value_tensors(node.meta["val"]))
            if node in follower.found or not all(map(_is_in_place, states)):
                return node
    return None


def meeting_rows(
    graph: OpGraph, nodes: Sequence[fx.Node], given: Mapping[fx.Node, int], ends: Collection[fx.Node], rows: int
) -> fx.Node | None:
    """The first of `nodes` in which `rows` rows meet, or of `ends` that has them elsewhere than along dimension 0.
    `given`: values with rows, and along which dimension. None where each row of the ends follows from its own."""
    follower = Follower(graph, rows, None)
    for node, dim in given.items():
        for tensor in value_tensors(node.meta["val"]):
            follower.states[id(tensor)] = ByRow(dim=dim)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in nodes:
            follower.node(node)
            if node in follower.found:
                return node
    states = {n: map(follower.state, value_tensors(n.meta["val"])) for n in ends}
    return next((node for node, found in states.items() if not all(map(_is_in_place, found))), None)


def keeps_rows_apart(graph: OpGraph, nodes: Sequence[fx.Node], value: fx.Node, rows: int) -> bool:
    """Whether each element of a value that `nodes` compute, the last of them, depends on one row at most, so that a sum
    over all of them is the sum of the parts' sums. The nodes depend on nothing but the batch and constants."""
    follower = _ConstantsByRow(graph, rows, None)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in nodes:
            entering = value_tensors(node.meta["val"]) if node.op == "placeholder" else ()
            if "eval_args" in node.meta or any(not t.dim() or t.shape[0] != rows for t in entering):
                return False
            follower.node(node)
    tensors = list(value_tensors(value.meta["val"]))
    return all(isinstance(follower.state(t), ByRow) and not follower.origins.get(id(t)) for t in tensors)


def _is_in_place(state: RowState) -> bool:
    return isinstance(state, ByRow) and (state.dim, state.inner, state.order) == (0, 1, None)


@dataclass(frozen=True)
class Effect:
    """The effect of a node: the states of its tensors, how rows met in it, and the numbers that it multiplied by."""

    states: tuple[RowState, ...]
    met: tuple[Met, ...]
    numbers: tuple[float, ...]


class Follower(TorchDispatchMode):
    """Follows the elements along one dimension of the inputs, here their rows, node by node (`node`)."""

    def __init__(self, graph: OpGraph, rows: int, powers: Powers | None):
        super().__init__()
        self.graph, self.rows, self.powers, self.is_clear = graph, rows, powers, True
        self.states: dict[int, RowState] = {}  # tensor's id -> state
        self.origins: dict[int, frozenset[fx.Node]] = {}  # tensor's id -> nodes where the rows in it met
        self.names: dict[int, Hashable] = {}  # tensor's id -> how it is computed
        self.numbered: dict[Hashable, int] = {}
        self.alive: list[torch.Tensor] = []  # ids stay those of one tensor
        self.sharing: dict[int, list[torch.Tensor]] = {}  # storage -> its tensors of nodes
        self.known: dict[Hashable, Effect] = {}
        self.found: dict[fx.Node, list[Met]] = {}
        self.numbers: dict[fx.Node, Sequence[float]] = {}
        self.by_rows: set[fx.Node] = set()
        self.now: tuple[list[Met], list[float]] = ([], [])
        self.own_powers: Sequence[float | None] | None = None
        self.counted = {divisor.input: divisor.spread for divisor in graph.loss.rules.divisors}
        self.orders = itertools.count()
        self.fakes: dict[int, torch.Tensor] = {}
        self.constants = ConstantValues(graph)

    # --- what rules ask and tell (`Watcher`)

    def state(self, tensor: torch.Tensor) -> RowState:
        return self.states.get(id(tensor)) or Free(varies=whole(d for d, n in enumerate(tensor.shape) if n != 1))

    def note(self, kind: Kind) -> None:
        self.now[0].append((kind, self.operator))

    def new_order(self) -> int:
        return next(self.orders)

    def scale(self, number: float) -> Scale:
        numbers = self.now[1]
        numbers.append(float(number))
        if self.own_powers is None:
            return Scale(unsure=abs(number) != 1 or self.rows == 1)
        power = self.own_powers[len(numbers) - 1] if len(numbers) <= len(self.own_powers) else None
        if power is None or power != int(power):
            return Scale(unsure=True)
        return Scale(int(power))

    # --- nodes

    def node(self, node: fx.Node) -> None:
        """Find the states of a node's tensors."""
        tensors = list(value_tensors(node.meta["val"]))
        self.now, self.own_powers = ([], []), None if self.powers is None else self.powers.get(node, ())
        if node.op == "placeholder":
            effect = Effect(tuple(self.entering(str(node.target), t) for t in tensors), (), ())
        elif node.op == "get_attr" or is_mode_switch(node):
            effect = Effect(tuple(self.state(t) for t in tensors), (), ())
        else:
            effect = self._compare_values(node, tensors, self._call_effect(node, tensors))
        self.numbers[node] = effect.numbers
        effect = self._compare_rows(node, tensors, effect)
        if effect.met:
            self.found[node] = list(effect.met)
        self._note(node, tensors, self.settle(node, tensors, effect))

    def _compare_rows(self, node: fx.Node, tensors: Sequence[torch.Tensor], effect: Effect) -> Effect:
        """The effect of a node that joins values of single rows, which are rows if each is computed as the others."""
        operands = [t for n in node.all_input_nodes for t in value_tensors(n.meta["val"])]
        states = [self.state(tensor) for tensor in operands]
        self._name(node, tensors, operands, effect)
        by_row: dict[int, list[Hashable]] = {}
        for tensor, state in zip(operands, states):
            if isinstance(state, OneRow):
                by_row.setdefault(state.number, []).append(self._name_of(tensor))
        joins = by_row and any(isinstance(state, ByRow) for state in effect.states)
        if not joins or all(names == by_row[0] for names in by_row.values()):
            return effect
        return replace(effect, met=(*effect.met, (Kind.ROW_NUMBER, str(node.target))))

    def _name(
        self, node: fx.Node, tensors: Sequence[torch.Tensor], operands: Sequence[torch.Tensor], effect: Effect
    ) -> None:
        """Name tensors by how they are computed: equal for what is taken from different rows in the same way."""
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            whole = node.args[0].meta["val"]
            if isinstance(whole, (tuple, list)):
                of = list(value_tensors(whole[node.args[1]]))  # type: ignore[index]
                self.names |= {id(new): self._name_of(old) for new, old in zip(tensors, of)}
                return
        call = call_key(self.graph, node, node.args, node.kwargs, self._name_of) or node
        is_taken = not any(isinstance(self.state(tensor), OneRow) for tensor in operands)
        for i, (tensor, state) in enumerate(zip(tensors, effect.states)):
            key: Hashable = (call, i)
            if is_taken and isinstance(state, OneRow):
                key = (*map(self._name_of, operands), state.part, tuple(tensor.shape))
            self.names[id(tensor)] = self.numbered.setdefault(key, len(self.numbered))
        for target in node.meta["mutates"]:
            for tensor in value_tensors(target.meta["val"]):
                for other in [tensor, *self.sharing.get(tensor.untyped_storage()._cdata, ())]:
                    key = (call, self._name_of(other))
                    self.names[id(other)] = self.numbered.setdefault(key, len(self.numbered))

    def _name_of(self, tensor: torch.Tensor) -> Hashable:
        return self.names.get(id(tensor), id(tensor))

    def settle(self, node: fx.Node, tensors: Sequence[torch.Tensor], effect: Effect) -> Effect:
        """The effect with which later nodes go on."""
        return effect

    def entering(self, name: str, tensor: torch.Tensor) -> RowState:
        """The state of an input: rows, or a number counted over the whole batch."""
        if name in self.counted:
            return Free(scale=Scale(int(self.counted[name])))  # a share of the whole batch's count grows with the rows
        if not tensor.dim():
            return Free()
        inner = max(1, tensor.shape[0] // self.rows)
        return ByRow(dim=0, inner=inner, step=ANY_STEP if name in self.graph.places else 0)

    def _call_effect(self, node: fx.Node, tensors: list[torch.Tensor]) -> Effect:
        key = None if node.meta["mutates"] or self.own_powers is not None else self._key(node)
        if key is not None and key in self.known:
            return self.known[key]
        before = next(self.orders)
        states = self._run(node, tensors)
        effect = Effect(states, tuple(dict.fromkeys(self.now[0])), tuple(self.now[1]))
        if key is not None and next(self.orders) == before + 1:  # no permutation of its own
            self.known[key] = effect
        return effect

    def _compare_values(self, node: fx.Node, tensors: list[torch.Tensor], effect: Effect) -> Effect:
        """The effect of a node, where the values of constants say that rows stay apart in it after all."""
        kinds = {kind for kind, _ in effect.met} if self.rows > 1 and not node.meta["mutates"] else set[Kind]()
        if Kind.ROW_NUMBER in kinds and any([self._learn_value(arg, node) for arg in node.all_input_nodes]):
            self.now = ([], [])
            effect = self._call_effect(node, tensors)
        masked = attention_mask(node) if Kind.PAIRS in kinds else None
        if masked is None:
            return effect
        states = [self.state(each.meta["val"]) for each in masked[0]]
        dims = [each.meta["val"].dim() - 2 for each in masked[0]]
        inner = [each.meta["val"].shape[-2] // self.rows for each in masked[0]]
        is_packed = states == [ByRow(dim=dim, inner=size) for dim, size in zip(dims, inner)]
        if is_packed and self.constants.part_rows(masked[1], node, self.rows):
            return replace(effect, states=(states[0],), met=())
        return effect

    def _learn_value(self, node: fx.Node, reader: fx.Node) -> bool:
        """Whether the value of a constant is the same for each row along a dimension, which its state did not say."""
        tensor = node.meta["val"]
        state = self.state(tensor) if isinstance(tensor, torch.Tensor) else None
        if not isinstance(state, Free) or (value := self.constants.value(node, reader)) is None:
            return False
        found = state
        for dim, size in enumerate(value.shape):
            inner = size // self.rows
            if differs(found, dim, inner, self.rows) and is_same_in_rows(value, dim, self.rows):
                others = {stretch for stretch in found.varies if stretch[0] != dim}
                found = replace(found, varies=frozenset({*others, (dim, 1, inner)}))
        self.states[id(tensor)] = found
        return found != state

    def _key(self, node: fx.Node) -> Hashable | None:
        """Equal for nodes with the same effect; None for a node that has a value which cannot be compared."""
        key = call_key(self.graph, node, node.args, node.kwargs, self._tensor_key)
        return None if key is None else (key, node.meta["no_grad"])

    def _tensor_key(self, tensor: torch.Tensor) -> Hashable:
        return tuple(tensor.shape), tensor.stride(), tensor.dtype, self.state(tensor)

    def _run(self, node: fx.Node, tensors: list[torch.Tensor]) -> tuple[RowState, ...]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        mode = next((t.fake_mode for t in self._fake_tensors(node)), None)
        try:
            with mode or nullcontext(), _Unsmoothed(), self:
                out = call_node(self.graph, node, args, kwargs, self._fake)
                if has_own_backward(node) and not self.now[0]:
                    self._follow_backward(node, args)
        except Exception as error:  # a call that works only while it is traced
            self.operator = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self.note(Kind.UNKNOWN)
            return (Mixed(),) * len(tensors)
        made = list(value_tensors(out))
        if len(made) != len(tensors):
            self.note(Kind.UNKNOWN)
            return (Mixed(),) * len(tensors)
        if any(kind in (Kind.GRADIENT, Kind.NO_RECORD) for kind, _ in self.now[0]):
            return (Mixed(),) * len(tensors)  # also of a constant, such as a weight
        return tuple(self.state(tensor) for tensor in made)

    def _follow_backward(self, node: fx.Node, args: Sequence[Any]) -> None:
        """Note whether rows meet in the backward of an autograd function, which is whatever its class says."""
        _, numbers = self.now
        try:
            with torch.enable_grad():
                operands = [self._with_gradient(arg) for arg in args]
                trained = [t for t, arg in zip(operands, args) if t is not arg]
                given = [t.clone() if t is not arg else t for t, arg in zip(operands, args)]  # which it may write into
                made = [t for t in value_tensors(node.target(*given)) if t.requires_grad]  # type: ignore[operator]
                gradients = [torch.empty_like(tensor) for tensor in made]
            self.alive += [*trained, *gradients]
            for tensor, gradient in zip(made, gradients):
                self.states[id(gradient)] = gradient_state(self.state(tensor))
            self.now = ([], numbers)
            found = torch.autograd.grad(made, trained, gradients, allow_unused=True) if made else ()
            is_derived = all(map(self._is_gradient, found, trained))
        finally:
            met, _ = self.now
            unknown = [each for each in met if each[0] is Kind.NO_RECORD]
            self.now = (unknown, numbers)
        if not unknown and (met or not is_derived):
            self.note(Kind.GRADIENT)

    def _with_gradient(self, arg: Any) -> Any:
        """The same fake tensor with the same state as a leaf of autograd, where its gradient is asked for."""
        if not isinstance(arg, torch.Tensor) or not arg.requires_grad:
            return arg
        leaf = arg.detach()
        self.states[id(leaf)] = self.state(arg)
        return leaf.requires_grad_()

    def _is_gradient(self, gradient: torch.Tensor | None, operand: torch.Tensor) -> bool:
        """Whether a gradient has the state of that of an operand."""
        state = Free(is_zero=True) if gradient is None else self.state(gradient)
        wanted = gradient_state(self.state(operand))
        is_open = wanted.scale.unsure or (state.scale.unsure and self.own_powers is None)  # until powers are known
        is_scaled = is_open or state.scale == wanted.scale
        if isinstance(state, Free) and not isinstance(wanted, Free):
            is_alike = isinstance(wanted, ByRow) and not differs(state, wanted.dim, wanted.inner, self.rows)
            return state.is_zero or (is_alike and is_scaled)
        if isinstance(state, ByRow):
            state = replace(state, step=0)
        return is_scaled and (isinstance(state, Free) or replace(state, scale=wanted.scale) == wanted)

    def _fake_tensors(self, node: fx.Node) -> list[Any]:
        values = [node.meta["val"], *(n.meta["val"] for n in node.all_input_nodes)]
        return [t for value in values for t in value_tensors(value) if hasattr(t, "fake_mode")]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self.fakes:
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            dtype = self.graph.compute_dtype(tensor) if is_parameter else tensor.dtype
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            self.states.pop(id(made), None)  # it was made under this mode
            self.fakes[id(tensor)] = made
        return self.fakes[id(tensor)]

    def _note(self, node: fx.Node, tensors: list[torch.Tensor], effect: Effect) -> None:
        origins: frozenset[fx.Node] = frozenset({node} if effect.met else ())
        for arg in node.all_input_nodes[:1] if node.target is gradient_if else node.all_input_nodes:
            for tensor in value_tensors(arg.meta["val"]):
                origins |= self.origins.get(id(tensor), frozenset())
        for tensor, state in zip(tensors, effect.states, strict=True):
            self._set(tensor, state, origins)
        for target in node.meta["mutates"]:
            for tensor in value_tensors(target.meta["val"]):
                for other in self.sharing.get(tensor.untyped_storage()._cdata, ()):
                    self._set(other, self.state(other), origins | self.origins.get(id(other), frozenset()))
        if node.meta.get("updates_buffers"):
            written = [t for target in node.meta["mutates"] for t in value_tensors(target.meta["val"])]
            if not written or not all(isinstance(self.state(tensor), Free) for tensor in written):
                self.by_rows.add(node)

    def _set(self, tensor: torch.Tensor, state: RowState, origins: frozenset[fx.Node]) -> None:
        self.states[id(tensor)] = state
        self.origins[id(tensor)] = frozenset() if isinstance(state, Free) else origins
        self.alive.append(tensor)
        group = self.sharing.setdefault(tensor.untyped_storage()._cdata, [])
        if all(tensor is not other for other in group):
            group.append(tensor)

    def _spread_state(self, tensor: torch.Tensor) -> None:
        """Bring the state of a tensor that was written in place to the nodes' values that share its storage."""
        for other in self.sharing.get(tensor.untyped_storage()._cdata, ()):
            self.states[id(other)] = self._seen_through(self.state(tensor), tensor, other)

    def _seen_through(self, state: RowState, written: torch.Tensor, other: torch.Tensor) -> RowState:
        """The state of a value after another one that shares its storage got `state`."""
        old = self.state(other)
        if written is other or (written.shape == other.shape and written.stride() == other.stride()):
            return state
        if isinstance(state, Free):
            return _partly(old, state, written, other) if isinstance(old, Free) else old
        if not isinstance(state, ByRow | OneRow):
            return state
        if isinstance(state, OneRow):
            self.note(Kind.ROW_NUMBER)
            return old if isinstance(old, ByRow) else Mixed()
        step = written.stride(state.dim) * state.inner
        for dim in range(other.dim()):
            inner, left = divmod(step, max(1, other.stride(dim)))
            if (
                inner
                and not left
                and other.shape[dim] % (inner * self.rows) == 0
                and other.shape[dim] >= inner * self.rows
            ):
                new = ByRow(scale=state.scale, dim=dim, inner=inner, order=state.order)
                agrees = isinstance(old, Free) or (isinstance(old, ByRow) and (old.dim, old.inner) == (dim, inner))
                if agrees and (self.rows > 1 or other.shape[dim] == inner):
                    return new
        self.note(Kind.UNKNOWN)
        return Mixed()

    # --- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        made = list(value_tensors(out))
        if not made and not func._schema.is_mutable:
            return out
        self.operator = operator_name(func)
        call = RowCall(self, func, args, kwargs, out)
        found = self._effect_of(call)
        states = self._with_unsure_scales(call, found if isinstance(found, list) else [found] * len(made))
        self._note_row_counts(call, states)
        assert len(states) >= len(made), f"the rule of {call.name} lacks results"
        for tensor, state in zip(made, states):
            self.states[id(tensor)] = state
            self.alive.append(tensor)
        for tensor in written_tensors(func, args, kwargs):
            if all(tensor is not other for other in made):  # a written result beside those returned
                self.states[id(tensor)] = plain(states[0]) if states else Mixed()
            self._spread_state(tensor)
        return out

    def _with_unsure_scales(self, call: RowCall, states: list[RowState]) -> list[RowState]:
        """The states, with an unsure scale of constants that are made of scaled ones by a rule that gives none."""
        known = operator_of(call.func)
        scales = {state.scale for t in call.tensors() if isinstance(state := self.state(t), Free) and not state.is_zero}
        if known.rows is multiply or known.elements is Elements.NONE or scales <= {ONE}:
            return states
        is_lost = [isinstance(state, Free) and not state.is_zero and state.scale == ONE for state in states]
        return [replace(s, scale=Scale(unsure=True)) if lost else s for s, lost in zip(states, is_lost)]

    def _note_row_counts(self, call: RowCall, states: Sequence[RowState]) -> None:
        """Note a number that the number of rows makes, other than as a factor that the result has in its scale, and
        values of several scales in one result."""
        rule = operator_of(call.func).rows
        if rule is multiply:
            return
        counted = [self.scale(number) for number in call.numbers()]
        operands = [(tensor, self.state(tensor)) for tensor in call.tensors()]
        given = [(t, state.scale) for t, state in operands if not (isinstance(state, Free) and state.is_zero)]
        before = {scale for _, scale in given} - {ONE}
        is_lost = any(isinstance(state, ByRow | OneRow) and state.scale not in before for state in states)
        is_read = set(counted) != {ONE} and all(state.scale == ONE for state in states)
        several = rule not in _BY_SCALE and len({scale for t, scale in given if t.is_floating_point()}) > 1
        if self.own_powers is not None and ((counted and is_read) or (before and is_lost) or several):
            self.note(Kind.ROW_COUNT)

    def _effect_of(self, call: RowCall) -> RowState | list[RowState]:
        known = operator_of(call.func)
        of_one = [t for t in call.tensors() if isinstance(self.state(t), OneRow)]
        if of_one and (known.elements is not Elements.JOINED or len({*map(self.state, of_one)}) == 1):
            return self._effect_of_one_row(call, of_one)
        if known.rows is not None:
            return known.rows(call)
        states = [self.state(tensor) for tensor in call.tensors()]
        if is_pointwise(call.func):
            return elementwise(call)
        if all(isinstance(state, Free) for state in states):
            return constants(call)
        if known is UNKNOWN and not any(isinstance(state, Mixed) for state in states):
            self.operator = record_name(call.func)
            return call.mix(Kind.NO_RECORD)
        return nonlinear(call, *states) or call.mix(Kind.UNKNOWN)

    def _effect_of_one_row(self, call: RowCall, operands: Sequence[torch.Tensor]) -> RowState | list[RowState]:
        """The effect of a call of which some operands are of one row: to all other rows they are constants."""
        before = {id(tensor): self.state(tensor) for tensor in operands}
        (number, *others) = {state.number for state in before.values() if isinstance(state, OneRow)}
        if others or not all(isinstance(self.state(t), Free) for t in call.tensors() if id(t) not in before):
            return nonlinear(call, *map(self.state, call.tensors())) or call.mix(Kind.ROW_NUMBER)
        for tensor in operands:
            self.states[id(tensor)] = Free(scale=self.state(tensor).scale, varies=whole(range(tensor.dim())))
        found = self._effect_of(call)
        self.states.update(before)
        states = found if isinstance(found, list) else [found] * max(1, len(call.results()))
        return [OneRow(s.scale, number) if isinstance(s, Free) else s for s in states]

    def trail(self, loss: fx.Node) -> Trail:
        """The result, once all nodes were seen."""
        (tensor,) = value_tensors(loss.meta["val"])
        state = self.state(tensor)
        is_clear = self.is_clear and not (isinstance(state, ByRow) and self.rows == 1)
        state = Mixed() if isinstance(state, ByRow | OneRow) else state
        reaching = self.origins.get(id(tensor), frozenset())
        above = Dataflow(self.graph.nodes).ancestors([loss])
        numbers = {node: numbers for node, numbers in self.numbers.items() if node in above}
        return Trail(state, self.found, reaching, numbers, frozenset(self.by_rows), is_clear)


class _ConstantsByRow(Follower):
    """Takes constants with the shape of rows, such as `torch.ones_like(mask)`, for values of these rows."""

    def settle(self, node: fx.Node, tensors: Sequence[torch.Tensor], effect: Effect) -> Effect:
        operands = [t for n in node.all_input_nodes for t in value_tensors(n.meta["val"])]
        states = tuple(self._operand_place(t, s, operands) for t, s in zip(tensors, effect.states, strict=True))
        return replace(effect, states=states)

    def _operand_place(self, tensor: torch.Tensor, state: RowState, operands: Sequence[torch.Tensor]) -> RowState:
        for operand in operands if isinstance(state, Free) else ():
            of = self.state(operand)
            if isinstance(of, ByRow) and of.dim < tensor.dim() and tensor.shape[of.dim] == operand.shape[of.dim]:
                return replace(of, scale=state.scale, step=0)
        return state


def powers_of(first: Trail, rows: int, second: Trail, other_rows: int) -> Powers:
    """The powers by which each number that the nodes of the first graph multiplied by grows with the number of rows, by
    another graph of the same model. Where that one has other calls, as of a loop over rows, it tells only whether it
    has the same numbers."""
    ratio, theirs = math.log(other_rows / rows), second.numbers.values()
    if first.has_calls_of(second):
        pairs = zip(first.numbers.items(), theirs)
        return {node: [power_of(a, b, ratio) for a, b in zip(row, other)] for (node, row), other in pairs}
    is_same = {*itertools.chain(*first.numbers.values())} == {*itertools.chain(*theirs)}
    return {node: [0.0 if is_same else None] * len(row) for node, row in first.numbers.items()}


def has_own_backward(node: fx.Node) -> bool:
    """Whether a node calls an autograd function, whose backward is whatever its class says."""
    kind = getattr(node.target, "__self__", None)
    return isinstance(kind, type) and issubclass(kind, torch.autograd.Function) and not node.meta["no_grad"]


def power_of(first: float, second: float, ratio: float) -> float | None:
    """The power of a number of rows by which a number grows from the first to the second; None if by none. `ratio`: the
    logarithm of how many times the rows are."""
    if first == second:
        return 0.0
    if first * second <= 0 or not math.isfinite(first * second):
        return None
    power = math.log(second / first) / ratio
    return float(round(power)) if abs(power - round(power)) < 1e-6 else None  # numbers of tensors are rounded to fp32


def _partly(old: Free, new: Free, written: torch.Tensor, other: torch.Tensor) -> Free:
    """The state of a constant after a part of it was written: along dimensions that both have, by their sizes and
    strides, all of it was."""
    places = {(size, step): dim for dim, (size, step) in enumerate(zip(other.shape, other.stride())) if size != 1}
    along = {dim: places.get((size, step)) for dim, (size, step) in enumerate(zip(written.shape, written.stride()))}
    moved = frozenset((d, low, high) for dim, low, high in new.varies if (d := along[dim]) is not None)
    return Free(varies=old.varies | moved | whole(set(places.values()) - set(along.values())))


class _Unsmoothed(TorchFunctionMode):
    """Label smoothing averages over what counts in several steps, which would hide that it is an average."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            given = inspect.signature(func).bind(*args, **kwargs).arguments
            if given.get("label_smoothing") and given.get("reduction", "mean") == "mean":
                return func(**{**given, "reduction": "none"}).mean()
        return func(*args, **kwargs)
