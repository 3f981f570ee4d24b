"""What an attention mask lets each query see, proven from the graph that makes the mask.

In: the node of a mask. Out: for each row of queries the interval of keys that it sees, if the mask follows from
constants alone: from no input's values, no parameter, no buffer and nothing random. Small tensors are computed as they
are, by the graph's own calls; tensors of one row per query and one column per key are followed in the forms of
`intervals`, so that a mask of any length takes memory for its rows only. What leaves these forms is computed whole
where it is not too large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.calls import function_name
from ...runtime.torch_names import tree_leaves
from ..dataflow import Dataflow
from ..opgraph import OpGraph, value_tensors
from .intervals import (
    Followed,
    Intervals,
    Sums,
    Unfollowed,
    as_intervals,
    as_sums,
    combined,
    compare,
    constant,
    first_and_last,
)

VECTOR_ELEMENTS = 1 << 20  # tensors up to this size are computed as they are
WHOLE_ELEMENTS = 1 << 24  # up to this size also those that have none of the forms
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC = ("add", "sub", "abs", "neg")
UNCHANGED = ("to", "contiguous", "clone", "detach", "long", "_to_copy")  # where the dtype is the same
ELEMENTWISE = (
    *COMPARISONS, *ARITHMETIC, *UNCHANGED, "mul", "and_", "or_", "xor", "invert", "__and__", "__or__", "__xor__",
    "__invert__", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_not", "bitwise_xor", "where", "masked_fill", "minimum", "maximum", "clamp", "type", "bool", "int",
    "float", "half", "double", "bfloat16",
)  # fmt: skip
VIEWS = ("expand", "unsqueeze", "view", "reshape", "getitem", "squeeze", "alias")
FILLED = {"ones": 1, "zeros": 0, "ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0}
FILLED_WITH = {"full": 1, "full_like": 1, "new_full": 2}  # the position of the value
SHAPE_ONLY = ("ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full")


def visible_keys(graph: OpGraph, mask: fx.Node) -> Intervals | None:
    """The keys that each query sees, as intervals with the value True; None where that is not proven.

    A mask of numbers is zero where a query sees, and the lowest number of its dtype, or less, where it does not.
    """
    chain = _chain(graph, mask)
    if chain is None:
        return None
    for most in (VECTOR_ELEMENTS, WHOLE_ELEMENTS):
        try:
            return _seen(_Values(graph, most).run(chain, mask))
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
    above = flow.ancestors([mask], lambda node: operands(node) if _is_constant(graph, node) else ())
    return flow.in_order(above) if all(_is_constant(graph, node) for node in above) else None


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node depends on."""
    if _name(node) in SHAPE_ONLY and isinstance(node.args[0], fx.Node):
        return [n for n in node.all_input_nodes if n is not node.args[0]]
    return node.all_input_nodes


def _is_constant(graph: OpGraph, node: fx.Node) -> bool:
    if node.op == "get_attr":
        value = graph.constants.get(str(node.target))
        return type(value) is Tensor and value.device.type == "cpu"
    return node.op in ("call_function", "call_method") and not node.meta.get("random")


def _name(node: fx.Node) -> str:
    return function_name(node.target).partition(".")[0]  # an ATen op's overload follows a dot


def _seen(value: Any) -> Intervals:
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
        mask = mask.swapped()
    elif not (sees and hides_outside):
        raise Unfollowed
    return mask.with_values(yes, ~yes)


def _sight(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where a mask shows a key, and where it hides one so that its probability is zero."""
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
                _check(node, value)
        return self.values[mask]

    def value(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.graph.constants[str(node.target)].clone()
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.operand)
        large = any(t.numel() > self.most for t in value_tensors(node.meta["val"]))
        formed = [a for a in (*args, *kwargs.values()) if isinstance(a, Followed)]
        if not large and not formed:
            try:
                return _call(node)(*args, **kwargs)
            except (RuntimeError, TypeError, ValueError, IndexError) as error:  # a call that needs what is not here
                raise Unfollowed from error
        found = _form(node, args, kwargs)
        return found.expanded(node.meta["val"].shape) if isinstance(found, Intervals) else found

    def operand(self, node: fx.Node) -> Any:
        if node in self.values:
            return self.values[node]
        like = node.meta["val"]  # its shape and dtype alone are read
        return torch.empty((), dtype=like.dtype).expand(like.shape)


def _check(node: fx.Node, value: Any) -> None:
    """Raise `Unfollowed` where a value is not of the kind that the graph has."""
    want = node.meta["val"]
    if isinstance(value, Tensor | Followed):
        same = isinstance(want, Tensor) and value.shape == want.shape and value.dtype == want.dtype
    else:
        same = True
    if not same:
        raise Unfollowed


def _call(node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        return _method(str(node.target))
    assert callable(node.target)
    return node.target


def _method(name: str) -> Callable[..., Any]:
    return lambda owner, *args, **kwargs: getattr(owner, name)(*args, **kwargs)


def _form(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Followed:
    """The value of a node in one of the forms."""
    name, like = _name(node), node.meta["val"]
    if node.meta.get("mutates") or not isinstance(like, Tensor) or like.dim() < 2:
        raise Unfollowed
    shape = tuple(like.shape)
    if name in FILLED or name in FILLED_WITH:
        return constant(torch.tensor([_fill(name, args, kwargs)], dtype=like.dtype), shape)
    if name in ("tril", "triu"):
        return _triangle(name, as_intervals(args[0], shape), int(_second(args, kwargs, "diagonal", 0)), shape)
    if name in VIEWS and isinstance(args[0], Followed):
        return _viewed(node, args, kwargs)
    if name == "expand":
        return as_intervals(args[0], shape)
    if name not in ELEMENTWISE:
        raise Unfollowed
    return _elementwise(node, args, kwargs, shape)


def _fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if name in FILLED:
        return FILLED[name]
    value = _second(args, kwargs, "fill_value", None, FILLED_WITH[name])
    if not isinstance(value, (bool, int, float)):
        raise Unfollowed
    return value


def _second(args: tuple[Any, ...], kwargs: dict[str, Any], name: str, default: Any, position: int = 1) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else default)


def _triangle(name: str, whole: Intervals, diagonal: int, shape: tuple[int, ...]) -> Intervals:
    """`tril` or `triu`."""
    end = (torch.arange(shape[-2]) + diagonal + (name == "tril")).clamp(0, shape[-1]).expand(shape[:-1])
    yes = torch.ones(1, dtype=torch.bool)
    lower = Intervals(torch.zeros_like(end), end, yes, ~yes, shape[-1])
    kept = lower if name == "tril" else lower.with_values(~yes, yes)
    return combined(lambda value, keep: torch.where(keep, value, torch.zeros_like(value)), [whole, kept])


def _viewed(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Followed:
    """Applied to a broadcast row or column, a call that keeps it one copies nothing."""
    others = args[1:]
    if any(isinstance(a, (Tensor, Followed)) for a in tree_leaves((others, kwargs))):
        raise Unfollowed
    call = _method("view") if _name(node) == "reshape" else _call(node)
    form: Followed = args[0]
    try:
        return form.viewed(lambda t: call(t, *others, **kwargs))
    except RuntimeError as error:  # this view would be a copy
        raise Unfollowed from error


def _elementwise(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> Followed:
    name, call = _name(node), _call(node)
    if any(isinstance(a, Sums) for a in args) or not any(isinstance(a, Intervals) for a in args):
        found = _arithmetic(name, args, kwargs, shape)
        if found is not None:
            return found
    places = [i for i, a in enumerate(args) if isinstance(a, (Tensor, Followed))]
    if any(isinstance(a, (Tensor, Followed)) for a in kwargs.values()) or not places:
        raise Unfollowed

    def on_values(*values: Tensor) -> Tensor:
        filled = list(args)
        for place, value in zip(places, values):
            filled[place] = value
        found: Tensor = call(*filled, **kwargs)
        return found

    return combined(on_values, [as_intervals(args[i], shape) for i in places])


def _arithmetic(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]) -> Followed | None:
    """A call on integers of rows and columns; None for one that is not among these."""
    if name in UNCHANGED and isinstance(args[0], Sums):
        return args[0]  # the check of dtypes refuses others than int64
    if kwargs or name not in (*COMPARISONS, *ARITHMETIC):
        return None
    sums = [as_sums(a, shape) for a in args]
    if name in COMPARISONS:
        return compare(name, sums[0], sums[1], shape)
    if any(s.is_absolute for s in sums):
        raise Unfollowed
    if name == "abs":
        return Sums(sums[0].rows, sums[0].columns, is_absolute=True)
    if name == "neg":
        return Sums(-sums[0].rows, -sums[0].columns)
    sign = 1 if name == "add" else -1
    return Sums(sums[0].rows + sign * sums[1].rows, sums[0].columns + sign * sums[1].columns)
