"""The keys that an attention mask lets each query see, proven from the graph that makes the mask.

In: the node of a mask. Out: for each row of queries the interval of keys that it sees, if the mask follows from
constants alone: from no input's values, no parameter, no buffer and nothing random. Small tensors are computed as they
are, by the graph's own calls; tensors of one row per query and one column per key are followed operator by operator in
the forms of `intervals`, so that a mask of any length takes memory for its rows only. What leaves these forms is
computed whole where it is not too large.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...runtime.torch_names import FakeTensor, tree_map_only
from ..dataflow import Dataflow
from ..kernels.call_node import call_node
from ..operators.calls import run_again, unread_operand
from ..operators.record import Elements, OperatorCall
from ..operators.table import operator_of
from ..opgraph import OpGraph, value_tensors
from .intervals import (
    FILLS,
    FLIPPED,
    SUMS,
    Followed,
    Intervals,
    Sums,
    Unfollowed,
    as_intervals,
    as_sums,
    combine,
    compare,
    constant,
    first_and_last,
)

VECTOR_ELEMENTS = 1 << 20  # tensors up to this size are computed as they are
WHOLE_ELEMENTS = 1 << 24  # up to this size also those that have none of the forms


def visible_keys(graph: OpGraph, mask: fx.Node) -> Intervals | None:
    """The keys that each query sees, as intervals with the value True; None where that is not proven.

    A mask of numbers is zero where a query sees, and the lowest number of its dtype, or less, where it does not.
    """
    chain = _chain(graph, mask)
    if chain is None:
        return None
    for most in (VECTOR_ELEMENTS, WHOLE_ELEMENTS):
        try:
            return _visible_intervals(_Values(graph, most).run(chain, mask))
        except Unfollowed:
            continue
    return None


def constant_value(graph: OpGraph, node: fx.Node) -> Tensor | None:
    """The value of a small tensor that follows from constants alone; None for any other."""
    chain = _chain(graph, node)
    try:
        found = None if chain is None else _Values(graph, VECTOR_ELEMENTS).run(chain, node)
    except Unfollowed:
        return None
    return found if isinstance(found, Tensor) else None


def _chain(graph: OpGraph, mask: fx.Node) -> list[fx.Node] | None:
    """The nodes that the mask is made of, in order; None if one of them depends on more than constants."""
    flow = Dataflow(graph.nodes)
    above = flow.ancestors([mask], lambda node: operands(graph, node) if _is_constant(graph, node) else ())
    return flow.sort_nodes(above) if all(_is_constant(graph, node) for node in above) else None


def operands(graph: OpGraph, node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node depends on."""
    unread = unread_operand(graph, node)
    return [n for n in node.all_input_nodes if n is not unread]


def _is_constant(graph: OpGraph, node: fx.Node) -> bool:
    if node.op == "get_attr":
        value = graph.constants.get(str(node.target))
        return type(value) is Tensor and value.device.type == "cpu"
    return node.op in ("call_function", "call_method") and not node.meta.get("random")


def _visible_intervals(value: Any) -> Intervals:
    """A mask's value as intervals with the value True. Raises `Unfollowed` for one that is no such mask."""
    yes = torch.ones(1, dtype=torch.bool)
    if isinstance(value, Tensor):
        is_seen, is_hidden = _sight(value)
        if value.dim() < 2 or not bool((is_seen | is_hidden).all()):
            raise Unfollowed
        begin, end = first_and_last(is_seen)
        return Intervals(begin, end, yes, ~yes, value.shape[-1])
    if not isinstance(value, Intervals):
        raise Unfollowed
    mask: Intervals = value
    (sees, hides), (sees_outside, hides_outside) = _sight(mask.inside), _sight(mask.outside)
    if mask.is_constant and sees:
        mask = constant(mask.inside, (*mask.begin.shape, mask.num_keys))
    elif hides and sees_outside:
        mask = mask.complement()
    elif not (sees and hides_outside):
        raise Unfollowed
    return mask.with_values(yes, ~yes)


def _sight(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The places where a mask shows a key, and where it hides a key so that its probability is zero."""
    if mask.dtype == torch.bool:
        return mask, ~mask
    if not mask.is_floating_point():
        raise Unfollowed
    return mask == 0, mask <= torch.finfo(mask.dtype).min


class _Values:
    """Runs a chain of nodes. `most`: the number of elements of a tensor that is computed as it is."""

    def __init__(self, graph: OpGraph, most: int):
        self.graph, self.most = graph, most
        self.values: dict[fx.Node, Any] = {}

    def run(self, chain: list[fx.Node], mask: fx.Node) -> Any:
        with torch.no_grad(), torch.device("cpu"):
            for node in chain:
                value = self.values[node] = self.value(node)
                _check(node.meta["val"], value)
        return self.values[mask]

    def value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.graph.constants[str(node.target)].clone()
        operands = {n: self.operand(n) for n in node.all_input_nodes}
        large = any(t.numel() > self.most for t in value_tensors(node.meta["val"]))
        try:
            if large or any(isinstance(value, Followed) for value in operands.values()):
                return self.follow(node, operands)
            args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
            return call_node(self.graph, node, args, kwargs, lambda tensor: tensor)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # a call that needs what is not here
            raise Unfollowed from error

    def operand(self, node: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        like = node.meta["val"]  # its shape and dtype alone are read
        return torch.empty((), dtype=like.dtype).expand(like.shape)

    def follow(self, node: fx.Node, operands: dict[fx.Node, Any]) -> Any:
        """The value of a node, found operator by operator."""
        again = None if node.meta.get("mutates") else run_again(node)
        if again is None:
            raise Unfollowed
        values = {id(like): operands[n] for n, like in again.operands.items()}

        def value(tensor: Tensor) -> Any:
            if id(tensor) not in values and isinstance(tensor, FakeTensor):
                raise Unfollowed  # one of several results
            return values.get(id(tensor), tensor)

        for call in again.calls:
            call.given = tree_map_only(Tensor, value, call.given)
            is_formed = any(isinstance(operand, Followed) for operand in call.given.values())
            if is_formed or any(t.numel() > self.most for t in call.results()):
                values[id(call.out)] = _form(call)
            else:
                values[id(call.out)] = call.func(**call.given)
            _check(call.out, values[id(call.out)])
        return value(again.value)


def _check(want: Any, value: Any) -> None:
    """Raise `Unfollowed` where a value is not of the kind that the graph has."""
    is_tensor = isinstance(value, Tensor | Followed)
    if is_tensor and not (isinstance(want, Tensor) and value.shape == want.shape and value.dtype == want.dtype):
        raise Unfollowed


def _form(call: OperatorCall) -> Followed:
    """The result of a call, whose tensors have values or forms, in one of the forms."""
    func, out, first = call.func, call.out, call.given.get("self")
    if func._schema.is_mutable or not isinstance(out, Tensor) or out.dim() < 2:
        raise Unfollowed
    shape, elements = tuple(out.shape), operator_of(func).elements
    if call.name.removeprefix("new_").removesuffix("_like") in FILLS:
        number = call.given.get("fill_value", "ones" in call.name)
        if not isinstance(number, (bool, int, float)):
            raise Unfollowed
        return constant(torch.tensor([number], dtype=out.dtype), shape)
    if call.name in ("tril", "triu"):
        found: Followed = _triangle(call.name, as_intervals(first, shape), call["diagonal"], shape)
    elif isinstance(first, Sums) and elements is Elements.SAME:
        found = first
    elif isinstance(first, Followed) and elements is Elements.RESHAPED:
        found = first.apply_view(lambda t: t.view(shape))
    elif isinstance(first, Followed) and func.is_view:
        found = first.apply_view(lambda t: func(**{**call.given, "self": t}))
    elif elements is Elements.SPREAD:
        found = as_intervals(first, shape)
    elif torch.Tag.pointwise in func.tags or elements is Elements.SAME or call.name == "masked_fill":
        found = _elementwise(call, shape)
    else:
        raise Unfollowed
    return found.broadcast(shape) if isinstance(found, Intervals) else found


def _triangle(name: str, whole: Intervals, diagonal: int, shape: tuple[int, ...]) -> Intervals:
    """`tril` or `triu`."""
    end = (torch.arange(shape[-2]) + diagonal + (name == "tril")).clamp(0, shape[-1]).expand(shape[:-1])
    yes = torch.ones(1, dtype=torch.bool)
    lower = Intervals(torch.zeros_like(end), end, yes, ~yes, shape[-1])
    kept = lower if name == "tril" else lower.with_values(~yes, yes)
    return combine(lambda value, keep: torch.where(keep, value, torch.zeros_like(value)), [whole, kept])


def _elementwise(call: OperatorCall, shape: tuple[int, ...]) -> Followed:
    tensors = {name: value for name, value in call.given.items() if isinstance(value, Tensor | Followed)}
    kinds = [type(value) for value in tensors.values()]
    if call.name in (*FLIPPED, *SUMS, "abs") and (Sums in kinds or Intervals not in kinds):
        return _arithmetic(call, shape)

    def on_values(*values: Tensor) -> Tensor:
        found: Tensor = call.func(**{**call.given, **dict(zip(tensors, values))})
        return found

    return combine(on_values, [as_intervals(value, shape) for value in tensors.values()])


def _arithmetic(call: OperatorCall, shape: tuple[int, ...]) -> Followed:
    """A call on integers of rows and columns."""
    sums = [as_sums(call[name], shape) for name in ("self", "other") if name in call.given]
    if call.name in FLIPPED:
        return compare(call.name, sums[0], sums[1], shape)
    if any(s.is_absolute for s in sums):
        raise Unfollowed
    if call.name == "abs":
        return Sums(sums[0].rows, sums[0].columns, is_absolute=True)
    add, options = call.func.overloadpacket, {name: call[name] for name in ("alpha",) if name in call.given}
    return Sums(add(*(s.rows for s in sums), **options), add(*(s.columns for s in sums), **options))
