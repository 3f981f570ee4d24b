"""The editor of op graphs: new nodes with the meta that `opgraph.py` promises, other operands, fewer nodes.

Edges between nodes are operands and `META_EDGES`. No other file writes these keys, replaces what a node reads, or
erases a node, so that no edit forgets a key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx

from ..ir.edges import META_EDGES, edges
from ..ir.plain_graph import PlainGraph
from ..runtime.torch_names import FakeTensor, tree_flatten
from .dataflow import Dataflow, closure
from .kernels.stand_ins import SHAPE_RULES
from .opgraph import OpGraph, build_module, value_tensors

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_OWN = (*META_EDGES, "updates_buffers", "random", "draw", "dims")  # meta of one node, which no neighbour takes over


class GraphEdit:
    """Writes nodes before `at`, or `after` it, in the modes in which `at`, or `like`, was recorded, at the module path
    `path`."""

    def __init__(self, graph: OpGraph, at: fx.Node, after: bool = False, like: fx.Node | None = None):
        like = like or at
        place = graph.graph.inserting_after if after else graph.graph.inserting_before
        self.graph, self.at, self.path, self.place = graph, like, str(like.meta["module_path"]), lambda: place(at)
        self.fake_mode = next(t.fake_mode for t in value_tensors(like.meta["val"]) if isinstance(t, FakeTensor))

    def call(self, target: Any, *args: Any, view_of: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        """A call of a torch function. `view_of`: the argument whose storage the result shares."""
        with self.place():
            node = self.graph.graph.call_function(target, args, kwargs)
        given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode, torch.set_grad_enabled(not self.at.meta["no_grad"]), self.autocast():
            return self._annotate(node, self._value(target, given, named), view_of)

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call. The first of several calls that differ in their tensors' memory alone, as in equal
        layers, runs; where sizes are symbols, each does."""
        run = SHAPE_RULES.get(target, target)
        if self.fake_mode.shape_env is not None:
            return run(*args, **kwargs)
        values, structure = tree_flatten((args, kwargs))
        modes = self.at.meta["no_grad"], self.at.meta["autocast"]
        key = (GraphEdit.call, target, tuple(map(_look, values)), structure, modes)
        if key in self.graph.known:
            return self.graph.known[key].clone()
        result = run(*args, **kwargs)
        held = {t.untyped_storage()._cdata for t in values if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in held:
            self.graph.known[key] = result.detach().clone().requires_grad_(result.requires_grad)  # unwritten
        return result

    def put(
        self, op: str, target: Any, args: tuple[Any, ...], value: Any, kwargs: dict[str, Any] | None = None,
        view_of: fx.Node | None = None,
    ) -> fx.Node:  # fmt: skip
        """A node whose value is known."""
        with self.place():
            node = self.graph.graph.create_node(op, target, args, kwargs or {})
        return describe(node, self.at, value, alias_of=view_of)

    def parameter(self, name: str, value: torch.Tensor) -> fx.Node:
        """A read of a parameter in the dtype of the computation."""
        with self.place():
            node = self.graph.graph.create_node("get_attr", name)
        with self.fake_mode:
            dtype = self.graph.compute_dtype(value)
            fake = torch.empty(value.shape, dtype=dtype, requires_grad=value.requires_grad)
        return self._annotate(node, fake, None)

    def _annotate(self, node: fx.Node, value: Any, view_of: fx.Node | None) -> fx.Node:
        at = self.at.meta
        is_alike = "dims" in at and getattr(value, "shape", None) == getattr(at["val"], "shape", ())
        more = {"dims": at["dims"]} if is_alike else {}
        return describe(node, self.at, value, alias_of=view_of, module_path=self.path, **more)

    def autocast(self) -> AbstractContextManager[Any]:
        """The modes of the model's own `torch.autocast` in which `at` was recorded."""
        setting = self.at.meta["autocast"]
        if setting is None:
            return nullcontext()
        device, dtype, enabled, cache = setting
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let every reader of `old` read `new`, and remove `old`."""
        replace_all(self.graph, {old: new})


def _look(value: Any) -> Any:
    """A value but for the memory of a tensor."""
    if isinstance(value, torch.Tensor):
        options = ("dtype", value.dtype), ("device", value.device)
        return tuple(value.shape), value.stride(), value.requires_grad, options
    return type(value), repr(value)


# --- meta


def describe(node: fx.Node, like: fx.Node | Mapping[str, Any], value: Any, **more: Any) -> fx.Node:
    """Give a node the meta of a neighbour, or this meta, with a value of its own and without edges.

    `more`: further meta, such as `mutates` and `alias_of`. Returns the node."""
    meta, left_out = (like.meta, _OWN) if isinstance(like, fx.Node) else (like, META_EDGES)
    kept = {"random": False} | {key: item for key, item in meta.items() if key not in left_out}
    node.meta = {**kept, "mutates": (), "alias_of": None, "val": value, **more}
    return node


def set_writes(node: fx.Node, targets: Iterable[fx.Node]) -> None:
    """Note which of its arguments' storages a node writes."""
    node.meta["mutates"] = tuple(targets)


def set_base(node: fx.Node, base: fx.Node | None) -> None:
    """Note whose storage a node's value shares."""
    node.meta["alias_of"] = base


def set_evaluation(node: fx.Node, arguments: Arguments | None) -> None:
    """Write the arguments that a node has in evaluation; None where they are those of training."""
    if arguments is None:
        node.meta.pop("eval_args", None)
        node.meta.pop("eval_kwargs", None)
    else:
        node.meta["eval_args"], node.meta["eval_kwargs"] = arguments


def evaluation_of(node: fx.Node) -> Arguments | None:
    """The arguments that a node has in evaluation; None where they are those of training."""
    return (node.meta["eval_args"], node.meta["eval_kwargs"]) if "eval_args" in node.meta else None


# --- operands


def set_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write a node's arguments in training."""
    node.args, node.kwargs = args, kwargs


def change_arguments(node: fx.Node, change: Callable[[tuple[Any, ...], dict[str, Any]], Arguments]) -> None:
    """Change a node's arguments, and in the same way those that it has in evaluation."""
    node.args, node.kwargs = change(node.args, dict(node.kwargs))
    evaluation = evaluation_of(node)
    if evaluation is not None:
        set_evaluation(node, change(evaluation[0], dict(evaluation[1])))


def read_instead(node: fx.Node, new: Mapping[fx.Node, fx.Node]) -> None:
    """Let a node read, write and be a view of other nodes: those of `new` in place of its keys."""
    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
    copy_edges(node, node, lambda n: new.get(n, n))


def copy_edges(node: fx.Node, copy: fx.Node, new: Callable[[fx.Node], Any]) -> None:
    """Give a copy the edges of a node, each to the node that `new` says. What it says None for is not written."""
    for key in META_EDGES:
        if key in node.meta:
            copy.meta[key] = fx.map_arg(node.meta[key], new)
    if copy.meta.get("mutates"):
        copy.meta["mutates"] = tuple(target for target in copy.meta["mutates"] if target is not None)


# --- readers


def replace_uses(graph: OpGraph, new: Mapping[fx.Node, fx.Node], readers: Collection[fx.Node] | None = None) -> None:
    """Let what reads a node of `new`, and outputs, have the node that stands for it. What that one is made of keeps the
    old node. `readers`: these alone, and outputs."""
    made_of = {old: _made_of(other, old) for old, other in new.items()}
    users = {user for old in new for user in old.users}
    for node in graph.nodes:
        more = node.meta.get("alias_of") in new or node.meta.get("mutates") or "eval_args" in node.meta
        if (node in users or more) and node.op != "output" and (readers is None or node in readers):
            own = {n: new[n] for n in edges(node) if n in new and node not in made_of[n]}
            if own:
                read_instead(node, own)
    set_outputs(graph, {name: new.get(node, node) for name, node in graph.outputs.items()})


def _made_of(node: fx.Node, old: fx.Node) -> set[fx.Node]:
    """A node, and what it is made of, back to an older node."""
    return closure([node], lambda n: () if n is old else (arg for arg in n.all_input_nodes if not arg < old))


def replace_all(graph: OpGraph, new: Mapping[fx.Node, fx.Node]) -> None:
    """Let every reader of a node of `new` read the one that stands for it, and remove it."""
    replace_uses(graph, new)
    erase(graph, new)


def set_outputs(graph: OpGraph, outputs: dict[str, fx.Node]) -> None:
    """Let the step return these values."""
    graph.outputs = outputs
    graph.graph.output_node().args = (dict(outputs),)


def put_input(graph: OpGraph, name: str, value: torch.Tensor) -> fx.Node:
    """A new input, after the others, which `OpGraph.inputs` does not have yet."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    with graph.graph.inserting_after(last):
        return describe(graph.graph.placeholder(name), last, value, source="")


# --- fewer nodes


def erase(graph: OpGraph | fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Remove nodes that no other node reads. The first node left that shares the storage of one becomes its owner."""
    own, gone = graph.graph if isinstance(graph, OpGraph) else graph, set(nodes)
    if not gone:
        return
    owners: dict[fx.Node, fx.Node] = {}  # a removed owner of a storage -> the first node left that shares it
    for node in own.nodes:
        base = node.meta.get("alias_of")
        while node not in gone and base in gone:
            above = base.meta["alias_of"]
            base = above if above is not None else owners.setdefault(base, node)
            node.meta["alias_of"] = base if base is not node else None
    for node in sorted(gone, reverse=True):
        own.erase_node(node)


def erase_dead(graph: OpGraph, kept: Iterable[fx.Node] = (), among: Collection[fx.Node] | None = None) -> None:
    """Remove what neither a result nor an effect needs. `kept`: nodes that stay although nothing reads them; `among`:
    these nodes at most."""
    dead = Dataflow(graph.nodes).dead(kept)
    if among is not None:
        outside = [node for node in dead if node not in among]
        dead -= closure(outside, lambda node: node.all_input_nodes)  # what stays reads these
    erase(graph, dead)


# --- copies


def copy_graph(graph: OpGraph) -> OpGraph:
    """The same step with nodes of its own, in the same order, over the same model."""
    made = PlainGraph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        copies[node] = made.node_copy(node, copies.__getitem__)
    for node, copy in copies.items():
        copy_edges(node, copy, copies.__getitem__)
    return dataclasses.replace(
        graph,
        module=build_module(graph.model, made, graph.unregistered_tensors),
        outputs={name: copies[node] for name, node in graph.outputs.items()},
        parts=dict(graph.parts),
        hooks=dict(graph.hooks),
        looked={},
    )
