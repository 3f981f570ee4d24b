"""The numbers by which a step picks rows of embeddings and classes of losses, as far as the batch alone says them.

In: the op graph. Out: the graph from a micro-batch's rows to those numbers, and the bounds of each.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict
from torch import fx, nn

from ..dataflow import Dataflow, shared_nodes
from ..loss.class_loss import class_loss
from ..opgraph import OpGraph, build_module, value_tensors
from ..sizes.named import Named

MOST_TIMES = 8  # the elements of the numbers: what is larger takes too long before every step


class PickBound(BaseModel):
    """The bounds of numbers that are made of `inputs`: 0 to `size` - 1, and `ignored`. `of`: what they pick from, with
    the user's line."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    inputs: tuple[str, ...]
    size: int
    ignored: int | None = None
    of: str


class PickRules(BaseModel):
    """The inputs of the graph that makes all numbers of a micro-batch, and their bounds, in order."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    inputs: tuple[str, ...] = ()
    bounds: tuple[PickBound, ...] = ()


def picked_rows(graph: OpGraph) -> tuple[fx.GraphModule | None, PickRules]:
    """The graph that makes the numbers; None where no numbers are known."""
    flow, shared = Dataflow(graph.nodes), shared_nodes(graph)
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    found: dict[tuple[fx.Node, int, int | None], PickBound] = {}
    wanted = set[fx.Node]()
    for node in graph.nodes:
        numbers, size, ignored, what = _pick(graph, node) or (None, 0, None, "")
        if not isinstance(numbers, fx.Node) or numbers not in shared or (numbers, size, ignored) in found:
            continue
        above = flow.ancestors([numbers])
        inputs = tuple(str(n.target) for n in graph.nodes if n in above and n.op == "placeholder")
        if inputs and all(_is_small(n, numbers) and not _names_sizes(n) for n in above):
            of = f"{what} ({node.meta.get('source') or node.name})"
            found[numbers, size, ignored] = PickBound(inputs=inputs, size=size, ignored=ignored, of=of)
            wanted |= above
    if not found:
        return None, PickRules()
    for node in flow.sort_nodes(wanted):
        copies[node] = made.node_copy(node, copies.__getitem__)
    made.output(tuple(copies[numbers] for numbers, _, _ in found))
    inputs = tuple(str(node.target) for node in made.nodes if node.op == "placeholder")
    return build_module(graph.model, made, graph.constants), PickRules(inputs=inputs, bounds=tuple(found.values()))


def _is_small(node: fx.Node, numbers: fx.Node) -> bool:
    """Whether a node costs next to nothing to compute once more on the batch's whole numbers."""
    tensors = list(value_tensors(node.meta.get("val")))
    most = MOST_TIMES * numbers.meta["val"].numel()
    whole = all(not t.is_floating_point() and not t.is_complex() and t.numel() <= most for t in tensors)
    return node.op in ("placeholder", "call_function", "call_method") and whole


def _names_sizes(node: fx.Node) -> bool:
    """Whether an argument is a size that differs from step to step."""
    leaves = list[Any]()
    fx.node.map_aggregate((node.args, node.kwargs), leaves.append)
    return any(isinstance(leaf, Named) for leaf in leaves)


def _pick(graph: OpGraph, node: fx.Node) -> tuple[Any, int, int | None, str] | None:
    """The numbers by which a node picks, of how many, which one it leaves out, and the name of what it picks from."""
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        if isinstance(leaf, (nn.Embedding, nn.EmbeddingBag)):
            numbers = node.args[0] if node.args else node.kwargs["input"]
            return numbers, leaf.num_embeddings, None, f"the {leaf.num_embeddings} rows of {node.target}"
    elif node.target in (F.embedding, F.embedding_bag):
        given = inspect.signature(F.embedding).bind_partial(*node.args[:2], **_operands(node)).arguments
        size = int(given["weight"].meta["val"].shape[0])
        return given["input"], size, None, f"a table of {size} rows"
    loss = class_loss(graph, node)
    if loss is None or loss.arguments["target"].meta["val"].is_floating_point():
        return None
    scores = loss.arguments["input"].meta["val"]
    size = int(scores.shape[min(1, scores.dim() - 1)])
    return loss.arguments["target"], size, loss.arguments["ignore_index"], f"a loss over {size} classes"


def _operands(node: fx.Node) -> dict[str, Any]:
    return {key: value for key, value in node.kwargs.items() if key in ("input", "weight")}
