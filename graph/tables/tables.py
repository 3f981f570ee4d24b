"""Tables of an op graph: matrices with a row per token, which embeddings look up and heads multiply.

In: the op graph. Out: for each such parameter the nodes that read it, or why its rows cannot be parts.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...runtime.functions import chunked_cross_entropy, evaluation_logits
from ..loss.chunk_head import refusal as whole_logits_refusal
from ..loss.head_loss import HeadLoss, head_losses, product_of
from ..opgraph import OpGraph

_SAFE = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}  # values with which rows are independent
_OWN, _OPERANDS = (chunked_cross_entropy, evaluation_logits), ("hidden", "weight", "bias")
# The arguments of a chunked loss that its parts have, and those of the sum of the parts.
OF_PARTS = ("class_weight", "ignore_index", "label_smoothing", "scale", "cap")
OF_SUM = ("class_weight", "ignore_index", "reduction", "label_smoothing")


@dataclass(frozen=True)
class Lookup:
    """A node that looks up rows of a table."""

    node: fx.Node
    ids: fx.Node
    padding_idx: int | None
    refusal: str = ""


@dataclass(frozen=True)
class Head:
    """A node that multiplies with a table. `bias`: the name of a parameter with a number for each row. `loss`: the
    cross entropy that is all the logits are for, where it is not yet part of the node."""

    node: fx.Node
    hidden: fx.Node
    bias: str = ""
    loss: HeadLoss | None = None


@dataclass(frozen=True)
class TokenTable:
    """A parameter by its first name, and all that reads it. `refusal`: why its rows cannot be parts."""

    name: str
    value: nn.Parameter
    dtype: torch.dtype  # of the computation
    lookups: tuple[Lookup, ...] = ()
    heads: tuple[Head, ...] = ()
    refusal: str = ""

    @property
    def rows(self) -> int:
        return int(self.value.shape[0])

    @property
    def bytes(self) -> int:
        return self.value.numel() * self.dtype.itemsize

    @property
    def biases(self) -> list[str]:
        """The parameters that are in parts where the table is."""
        return list(dict.fromkeys(head.bias for head in self.heads if head.bias))


def find_tables(graph: OpGraph) -> dict[str, TokenTable]:
    """The tables of a graph by name: what embeddings look up, and the heads of cross entropies."""
    ties = graph.ties()
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    values: dict[str, nn.Parameter] = {}
    for node in graph.nodes:
        for name, value in graph.node_parameters(node).items():
            name = ties.get(name, name)
            values[name] = value
            found = [node] if node.op == "call_module" else list(node.users)
            readers[name] += [reader for reader in found if reader not in readers[name]]
    finder = _Finder(graph, ties, readers)
    tables = {name: finder.table(name, value) for name, value in values.items()}
    return {name: table for name, table in tables.items() if table is not None}


class _Finder:
    def __init__(self, graph: OpGraph, ties: dict[str, str], readers: dict[str, list[fx.Node]]):
        self.graph, self.ties, self.readers = graph, ties, readers
        rows = [row for row in head_losses(graph) if isinstance(row, HeadLoss) and not whole_logits_refusal(row)]
        self.losses = {row.product: row for row in rows}

    def table(self, name: str, value: nn.Parameter) -> TokenTable | None:
        """The readers of a parameter, if tables are read so."""
        if value.dim() != 2:
            return None
        nodes = self.readers[name]
        lookups = {node: lookup for node in nodes if (lookup := self.lookup(node)) is not None}
        heads = {node: head for node in nodes if (head := self.head(node, name)) is not None}
        is_head = any(head.loss or head.node.target in _OWN for head in heads.values())
        if not lookups and (not is_head or value.shape[0] <= value.shape[1]):  # a classifier has few rows
            return None
        others = [node for node in nodes if node not in lookups and node not in heads]
        refusals = [lookup.refusal for lookup in lookups.values() if lookup.refusal]
        refusals += [f"{node.meta.get('source') or node.name} reads all of it" for node in others]
        refusals += ["it is a part already"] if name in self.graph.parts else []
        refusals += ["forward changes it in place"] if name in self.graph.changes else []
        dtype = self.graph.compute_dtype(value)
        table = TokenTable(name, value, dtype, tuple(lookups.values()), tuple(heads.values()), "".join(refusals[:1]))
        return table

    def head(self, node: fx.Node, weight: str) -> Head | None:
        """The product with the parameter `weight` that a node makes, if it makes one and nothing else with it."""
        operands: Any = product_of(self.graph, node)
        if node.target in _OWN:
            named = dict(zip(_OPERANDS, node.args)) | dict(node.kwargs)
            operands = tuple(named.get(key) for key in _OPERANDS)
        if operands is None or self.first_name(operands[1]) != weight:
            return None
        hidden, _, bias = operands
        name = self.first_name(bias) if bias is not None else ""
        if hidden.meta["val"].dim() < 2 or (bias is not None and not self.only_for(weight, name)):
            return None
        return Head(node, hidden, name, self.losses.get(node))

    def first_name(self, operand: fx.Node | str) -> str:
        """The first name of the parameter that an operand is; empty for another operand."""
        if isinstance(operand, fx.Node):
            operand = str(operand.target) if operand.op == "get_attr" else ""
        name = self.ties.get(operand, operand)
        return name if name in self.readers else ""

    def only_for(self, weight: str, bias: str) -> bool:
        """Whether a bias is a parameter that only products with this weight read."""
        return bool(bias) and all(node in self.readers[weight] for node in self.readers[bias])

    def lookup(self, node: fx.Node) -> Lookup | None:
        """The lookup that a node makes, if it makes one."""
        given: dict[str, Any]
        if node.op == "call_module":
            leaf = self.graph.module.get_submodule(str(node.target))
            if type(leaf) is not nn.Embedding:
                return None
            given = {"input": node.args[0] if node.args else node.kwargs["input"], "weight": None}
            given |= {key: getattr(leaf, key) for key in ("padding_idx", *_SAFE)}
        elif node.target is F.embedding:
            bound = inspect.signature(F.embedding).bind(*node.args, **node.kwargs)
            bound.apply_defaults()
            given = dict(bound.arguments)
        else:
            return None
        if not isinstance(given["input"], fx.Node):
            return None
        wrong = [f"{key}={given[key]}" for key, usual in _SAFE.items() if given[key] != usual]
        refusal = f"its lookup has {', '.join(wrong)}, which takes whole tables" if wrong else ""
        padding = given["padding_idx"]
        if padding is not None and padding < 0:  # of a function; modules have counted it from 0
            padding += int(given["weight"].meta["val"].shape[0])
        return Lookup(node, given["input"], padding, refusal)


def loss_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `chunked_cross_entropy` by name."""
    arguments: dict[str, Any] = inspect.signature(chunked_cross_entropy).bind(*node.args, **node.kwargs).arguments
    more = arguments.pop("more", {})
    return {**arguments, **more}
