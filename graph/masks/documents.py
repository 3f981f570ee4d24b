"""Masks that show each query the keys of its own document, up to its place.

In: the node of a mask. Out: the node with a number for each token, equal for those of one document, if the mask is
proven to say just "the same document and not later". What makes up such a mask is followed back: conjunctions to their
parts, and a tensor of one row of queries, or one column of keys, to the tokens' numbers that it only lays out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...ir.calls import call_name
from ..kernels.call_node import call_node
from ..operators.calls import copied_operand, only_operator
from ..operators.record import Elements
from ..opgraph import OpGraph
from .calls import form_of
from .visible import constant_value, visible_keys

_LAYOUTS = tuple(way for way in Elements if way is not Elements.NONE)

_Side = tuple[fx.Node, bool]  # the tokens' numbers, and whether they are those of the queries


def documents_of(graph: OpGraph, mask: fx.Node) -> fx.Node | None:
    """The tokens' documents, where a mask shows those of one document up to the query's place; else None."""
    shape = mask.meta["val"].shape
    if len(shape) != 4 or shape[1] != 1 or shape[2] != shape[3] or mask.meta["val"].dtype != torch.bool:
        return None
    documents: set[fx.Node] = set()
    positions: set[fx.Node] = set()
    is_causal = False
    for part in parts_of(graph, mask):
        told = _comparison(graph, part, tuple(shape))
        if told is not None:
            (documents if told[0] == "eq" else positions).add(told[1])
        elif not shows_all(graph, part):
            if form_of(visible_keys(graph, part), shape[-1], shape[-1]) != "causal":
                return None
            is_causal = True
    if len(documents) != 1:
        return None
    (found,) = documents
    if positions and positions != {_counted_positions(graph, found)}:
        return None
    return found if positions or is_causal else None


def counted_input(graph: OpGraph, documents: fx.Node, rows: int) -> str:
    """The input of positions in which these documents are counted, so that their numbers grow along each of these rows;
    "" where that is not proven."""
    positions = _counted_positions(graph, documents)
    if positions is None or positions.op != "placeholder" or documents.meta["val"].shape[0] != rows:
        return ""
    return str(positions.target) if str(positions.target) in graph.inputs else ""


def parts_of(graph: OpGraph, mask: fx.Node) -> Iterator[fx.Node]:
    """The masks that a mask is the conjunction of."""
    operands = mask.all_input_nodes
    if len(operands) != 2 or only_operator(graph, mask) not in ("bitwise_and", "logical_and"):
        copied = copied_operand(graph, mask, Elements.SAME, Elements.SPREAD)
        operands = [] if copied is None else [copied]
    if mask.meta.get("mutates") or not operands or not all(map(_is_boolean, operands)):
        yield mask
    else:
        for operand in operands:
            yield from parts_of(graph, operand)


def shows_all(graph: OpGraph, part: fx.Node) -> bool:
    """Whether a small mask hides nothing, whatever the batch."""
    known = constant_value(graph, part)
    return known is not None and bool(known.all())


def _is_boolean(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor) and node.meta["val"].dtype == torch.bool


def _comparison(graph: OpGraph, node: fx.Node, shape: tuple[int, ...]) -> tuple[str, fx.Node] | None:
    """("eq", numbers) for "the query's number is the key's", ("le", numbers) for "the key's number is at most the
    query's", where both are the same tokens' numbers."""
    name = only_operator(graph, node)
    if not name or len(node.args) != 2 or node.kwargs:
        return None
    sides = [_side(graph, arg, shape) if isinstance(arg, fx.Node) else None for arg in node.args]
    left, right = sides
    if left is None or right is None or left[0] is not right[0] or left[1] == right[1]:
        return None
    if name == "eq":
        return "eq", left[0]
    return ("le", left[0]) if name == ("ge" if left[1] else "le") else None


def _side(graph: OpGraph, node: fx.Node, shape: tuple[int, ...]) -> _Side | None:
    """The tokens' numbers that a tensor lays out, along queries or along keys of masks of this shape."""
    chain = []
    while (before := copied_operand(graph, node, *_LAYOUTS)) is not None and node.args[:1] == (before,):
        chain.append(node)
        node = before
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 2 or value.dtype != torch.int64 or value.shape[1] != shape[-1]:
        return None
    probe = torch.arange(value.numel()).view(value.shape)
    found: Any = probe
    for step in reversed(chain):
        found = _laid_out(graph, step, found)
        if not isinstance(found, Tensor) or found.dtype != torch.int64:
            return None
    if found.dim() != 4 or value.shape[0] not in (1, shape[0]):
        return None
    for is_query in (True, False):
        wanted = probe[:, None, :, None] if is_query else probe[:, None, None, :]
        lengths = (shape[0], 1, *wanted.shape[2:])
        if found.shape[2:] == wanted.shape[2:] and torch.equal(found.expand(lengths), wanted.expand(lengths)):
            return node, is_query
    return None


def _laid_out(graph: OpGraph, node: fx.Node, value: Tensor) -> Any:
    """The call on other numbers; None where more than constants says how it lays them out."""
    operands = {n: value if n is node.args[0] else constant_value(graph, n) for n in node.all_input_nodes}
    if any(operand is None for operand in operands.values()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), operands.__getitem__)
    try:
        return call_node(graph, node, args, kwargs, lambda tensor: tensor)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None


def _counted_positions(graph: OpGraph, documents: fx.Node) -> fx.Node | None:
    """The positions in which documents are counted by the places where they do not go up by one, as transformers does:
    `(diff(positions, prepend=...) != 1).cumsum(-1)`. Inside of a document they go up then."""
    borders, steps, one = _operand(documents, "cumsum"), None, None
    if borders is not None and _dim(documents, 1, None) and only_operator(graph, borders) == "ne":
        steps, one = (*borders.args, None, None)[:2]
    if not isinstance(steps, fx.Node) or one != 1:
        return None
    positions, options = _operand(steps, "diff"), dict(steps.kwargs)
    first: Any = options.pop("prepend", None)
    if positions is None or len(steps.args) != 1 or options.keys() - {"dim"} or not _dim(steps, 2, -1):
        return None
    if not isinstance(first, fx.Node) or first.meta["val"].shape[-1] != 1:
        return None
    wide = _operand(positions, "expand")
    return positions if wide is None or wide.meta["val"].dim() != 2 else wide


def _operand(node: fx.Node, name: str) -> fx.Node | None:
    """The first operand of a call of this name."""
    found = node.args[0] if call_name(node) == name and node.args else None
    return found if isinstance(found, fx.Node) else None


def _dim(node: fx.Node, place: int, default: int | None) -> bool:
    """Whether a call goes along the last dimension."""
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else default)
    return dim in (-1, node.meta["val"].dim() - 1)
