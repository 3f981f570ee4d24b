"""Tables of an op graph: matrices with a row per token, which embeddings look up.

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

from .blocks import compute_dtype
from .opgraph import OpGraph

_SAFE = {"max_norm": None, "scale_grad_by_freq": False, "sparse": False}  # values with which rows are independent


@dataclass(frozen=True)
class Lookup:
    """A node that looks up rows of a table."""

    node: fx.Node
    ids: fx.Node
    padding_idx: int | None
    refusal: str = ""


@dataclass(frozen=True)
class TokenTable:
    """A parameter by its first name, and all that reads it. `refusal`: why its rows cannot be parts."""

    name: str
    value: nn.Parameter
    dtype: torch.dtype  # of the computation
    lookups: tuple[Lookup, ...]
    refusal: str = ""

    @property
    def rows(self) -> int:
        return int(self.value.shape[0])

    @property
    def bytes(self) -> int:
        return self.value.numel() * self.dtype.itemsize

    @property
    def nodes(self) -> list[fx.Node]:
        """The nodes that compute with the table."""
        return [lookup.node for lookup in self.lookups]


def find_tables(graph: OpGraph) -> dict[str, TokenTable]:
    """The tables of a graph by name."""
    ties = graph.ties()
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    values: dict[str, nn.Parameter] = {}
    for node in graph.nodes:
        for name, value in graph.node_parameters(node).items():
            name = ties.get(name, name)
            values[name] = value
            readers[name] += [node] if node.op == "call_module" else list(node.users)
    found = {}
    for name, nodes in readers.items():
        lookups = [_lookup(graph, node) for node in dict.fromkeys(nodes)]
        made = tuple(lookup for lookup in lookups if lookup is not None)
        if made:
            others = [node for node, lookup in zip(dict.fromkeys(nodes), lookups) if lookup is None]
            refusal = next((lookup.refusal for lookup in made if lookup.refusal), "")
            if others and not refusal:
                refusal = f"{others[0].meta.get('source') or others[0].name} reads all of it"
            refusal = refusal or _of_the_parameter(graph, name)
            found[name] = TokenTable(name, values[name], compute_dtype(graph, values[name]), made, refusal)
    return found


def _of_the_parameter(graph: OpGraph, name: str) -> str:
    if name in graph.parts:
        return "it is a part already"
    return "forward changes it in place" if name in graph.changes else ""


def _lookup(graph: OpGraph, node: fx.Node) -> Lookup | None:
    """The lookup that a node makes, if it makes one."""
    given: dict[str, Any]
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        if type(leaf) is not nn.Embedding:
            return None
        given = {"input": node.args[0] if node.args else node.kwargs["input"]}
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
    if padding is not None and padding < 0:
        padding += _rows(graph, node, given)
    return Lookup(node, given["input"], padding, refusal)


def _rows(graph: OpGraph, node: fx.Node, given: dict[str, Any]) -> int:
    weight = given.get("weight")
    return int(weight.meta["val"].shape[0]) if isinstance(weight, fx.Node) else 0
