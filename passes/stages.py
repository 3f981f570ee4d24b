"""Stages: the part of the op graph that one device runs between two messages, as a graph of its own.

In: op graph, blocks, and which blocks make a stage. Out: `Stage`s, each with the interface that programs refer to
(`StageSpec`) and a graph that code is printed from. Shared nodes (masks, position ids) are cloned into every stage that
reads them. A value that a later stage reads is an output here and an input there, whatever lies between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..runtime.errors import PassError, PlanError
from ..runtime.program import ParamSpec, StageSpec, TensorSpec, dtype_bytes
from .blocks import Block, shared_nodes, storage_root
from .opgraph import OpGraph, value_tensors

COMPUTE_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@dataclass
class Stage:
    """`graph`'s placeholders are `spec.inputs`, its results `spec.outputs` then `spec.extra_outputs`."""

    spec: StageSpec
    graph: fx.GraphModule
    blocks: tuple[str, ...]


def build_stages(graph: OpGraph, blocks: Sequence[Block], partition: list[list[str]]) -> list[Stage]:
    """One stage per list of block names. Raises `PassError` unless every block is in exactly one stage and
    no stage reads a value of a later one."""
    facts = _Facts(graph, blocks, _homes(blocks, partition))
    return [_Builder(facts, i, tuple(names)).build() for i, names in enumerate(partition)]


def _homes(blocks: Sequence[Block], partition: list[list[str]]) -> dict[fx.Node, int]:
    by_name = {block.name: block for block in blocks}
    home: dict[fx.Node, int] = {}
    placed: set[str] = set()
    for index, names in enumerate(partition):
        for name in names:
            if name not in by_name:
                raise PassError(f"stage {index} names block {name!r}, which this model does not have")
            if name in placed:
                raise PassError(f"block {name!r} is in two stages")
            placed.add(name)
            home.update(dict.fromkeys(by_name[name].nodes, index))
    missing = [name for name in by_name if name not in placed]
    if missing:
        raise PassError(f"no stage holds block {missing[0]!r}")
    for node, index in home.items():
        for arg in node.all_input_nodes:
            if home.get(arg, 0) > index:
                raise PassError(f"stage {index} reads {arg.name} of the later stage {home[arg]}: a cycle")
    return home


class _Facts:
    """What all stages of one partition ask of the model, found once."""

    def __init__(self, graph: OpGraph, blocks: Sequence[Block], home: dict[fx.Node, int]):
        self.graph, self.home = graph, home
        self.nodes = graph.nodes
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.shared = shared_nodes(graph)
        self.ties = graph.ties()
        self.parameters, self.buffers = graph.parameters(), graph.buffers()
        self.last = max(home.values())
        self.own: dict[int, list[fx.Node]] = {}
        for node in self.nodes:
            if node in home:
                self.own.setdefault(home[node], []).append(node)
        self.blocks = {block.name: block for block in blocks}
        self.writers: dict[fx.Node, list[fx.Node]] = {}
        for node in self.shared:
            for target in node.meta.get("mutates", ()):
                self.writers.setdefault(storage_root(target), []).append(node)
        self.first_home: dict[str, int] = {}  # the stage that counts and saves a parameter
        for node, index in home.items():
            for name in graph.node_parameters(node):
                canonical = self.ties.get(name, name)
                self.first_home[canonical] = min(index, self.first_home.get(canonical, index))


class _Builder:
    def __init__(self, facts: _Facts, index: int, names: tuple[str, ...]):
        self.facts, self.graph, self.home = facts, facts.graph, facts.home
        self.index, self.names = index, names
        self.blocks = [facts.blocks[name] for name in names]
        self.shared, self.order = facts.shared, facts.order
        self.is_last = index == facts.last

    def build(self) -> Stage:
        own = self.facts.own.get(self.index, [])
        results = {name: node for name, node in self.graph.outputs.items() if self._is_mine(node)}
        outside = self._shared_closure([a for n in own for a in n.all_input_nodes] + list(results.values()))
        boundary = sorted(
            {a for n in own for a in n.all_input_nodes if self.home.get(a, self.index) != self.index},
            key=self.order.__getitem__,
        )
        batch = sorted((n for n in outside if n.op == "placeholder"), key=self.order.__getitem__)
        body = sorted([*own, *(n for n in outside if n.op != "placeholder")], key=self.order.__getitem__)
        sent = [n for n in own if any(self.home.get(user, self.index) > self.index for user in n.users)]
        loss = next((n for name, n in results.items() if name == "loss"), None)
        outputs = [*sent, *([loss] if loss is not None and loss not in sent else [])]
        extra = {name: n for name, n in results.items() if n not in outputs}
        module = self._graph([*boundary, *batch], body, [*outputs, *extra.values()])
        spec = self._spec(boundary, batch, outputs, extra, loss, body)
        return Stage(spec, module, self.names)

    def _is_mine(self, node: fx.Node) -> bool:
        return self.home.get(node) == self.index or (node not in self.home and self.is_last)

    def _shared_closure(self, wanted: list[fx.Node]) -> set[fx.Node]:
        """Shared nodes that these read, with all that they read, and every node that writes one of them in place."""
        found: set[fx.Node] = set()
        stack = [n for n in wanted if n in self.shared]
        while stack:
            node = stack.pop()
            if node not in found:
                found.add(node)
                stack.extend(a for a in node.all_input_nodes if a in self.shared)
                stack.extend(self.facts.writers.get(storage_root(node), ()))
        return found

    def _graph(self, inputs: list[fx.Node], body: list[fx.Node], outputs: list[fx.Node]) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        block_of = {n: block for block in self.blocks for n in block.nodes}
        for node in body:
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            block = block_of.get(node)
            copy.meta["block"] = block.name if block else ""
            copy.meta["block_hash"] = block.hash if block else ""
            for key in ("eval_args", "eval_kwargs"):
                if key in node.meta:
                    copy.meta[key] = fx.node.map_arg(node.meta[key], copies.__getitem__)
            for key in ("mutates",):
                copy.meta[key] = tuple(copies[n] for n in node.meta.get(key, ()) if n in copies)
            copy.meta["alias_of"] = copies.get(node.meta.get("alias_of"))  # type: ignore[arg-type]
        graph.output(tuple(copies[n] for n in outputs))
        return fx.GraphModule(self.graph.module, graph, f"Stage{self.index}")

    def _spec(
        self,
        boundary: list[fx.Node],
        batch: list[fx.Node],
        outputs: list[fx.Node],
        extra: dict[str, fx.Node],
        loss: fx.Node | None,
        body: list[fx.Node],
    ) -> StageSpec:
        inputs = [*(_tensor(n, self.graph) for n in boundary), *(_tensor(n, self.graph, False) for n in batch)]
        trained, buffers = self._owned(body)
        costs = _stage_costs(self.blocks, {*boundary, *batch}, outputs)
        return StageSpec(
            name=f"stage{self.index}",
            inputs=tuple(inputs),
            outputs=tuple(_tensor(n, self.graph) for n in outputs),
            extra_outputs=tuple(_tensor(n, self.graph, False, name) for name, n in extra.items()),
            params=tuple(trained),
            buffers=tuple(buffers),
            loss=loss.name if loss is not None else None,
            rematerialisable=not self._reads_what_it_writes(body),
            title=_title(self.names),
            **costs,
        )

    def _owned(self, body: list[fx.Node]) -> tuple[list[ParamSpec], list[ParamSpec]]:
        """Parameters and buffers that the stage's nodes use, each object once, under its first name here."""
        facts, ties = self.facts, self.facts.ties
        found: dict[str, ParamSpec] = {}
        taken: set[str] = set()
        held: dict[str, ParamSpec] = {}
        for node in body:
            for name, tensor, is_parameter in _named_tensors(self.graph, node, facts.parameters, facts.buffers):
                canonical = ties.get(name, name)
                if is_parameter and canonical not in taken:
                    taken.add(canonical)
                    owner = facts.first_home[canonical] == self.index
                    dtype = _compute_dtype(tensor, self.graph)
                    found[name] = ParamSpec(name, tuple(tensor.shape), dtype, tensor.requires_grad, owner)
                elif not is_parameter and name not in held:
                    held[name] = ParamSpec(name, tuple(tensor.shape), _name(tensor.dtype), False)
        return list(found.values()), list(held.values())

    def _reads_what_it_writes(self, body: list[fx.Node]) -> bool:
        """A buffer written by anything but batch normalisation: a second forward would see the written value."""
        for node in body:
            if node.meta.get("updates_buffers") and not (
                node.op == "call_module"
                and isinstance(self.graph.module.get_submodule(str(node.target)), torch.nn.modules.batchnorm._NormBase)
            ):
                return True
        return False


def _named_tensors(
    graph: OpGraph, node: fx.Node, parameters: dict[str, Any], buffers: dict[str, Any]
) -> list[tuple[str, torch.Tensor, bool]]:
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        rows = [(f"{node.target}.{n}", p, True) for n, p in leaf.named_parameters(remove_duplicate=False)]
        return [*rows, *((f"{node.target}.{n}", b, False) for n, b in leaf.named_buffers(remove_duplicate=False))]
    if node.op == "get_attr":
        name = str(node.target)
        if name in parameters:
            return [(name, parameters[name], True)]
        if name in buffers:
            return [(name, buffers[name], False)]
        if name in graph.constants:
            return [(name, graph.constants[name], False)]
    return []


def _stage_costs(blocks: list[Block], inputs: set[fx.Node], outputs: list[fx.Node]) -> dict[str, Any]:
    """Costs of blocks that run one behind the other. Values between blocks count once, where something saves them."""
    kept = 0
    between: set[fx.Node] = set()
    forward_peak = light_peak = backward_peak = 0
    live_between = 0
    for block in blocks:
        cost = block.cost
        forward_peak = max(forward_peak, kept + cost.forward_peak_bytes)
        light_peak = max(light_peak, cost.light_peak_bytes + live_between)
        for node, saved in zip(block.inputs, cost.saved_inputs):
            if saved and node not in inputs and node not in between:
                between.add(node)
                kept += _bytes(node)
        kept += cost.kept_bytes
        for node, saved in zip(block.outputs, cost.saved_outputs):
            if saved:
                between.add(node)
        backward_peak = max(backward_peak, cost.backward_peak_bytes)
        live_between = sum(_bytes(n) for n in block.outputs)
    out_bytes = sum(_bytes(n) for n in outputs)
    return {
        "kept_bytes": kept,
        "forward_workspace_bytes": max(0, forward_peak - kept - out_bytes),
        "light_workspace_bytes": max(0, light_peak - out_bytes),
        "backward_workspace_bytes": backward_peak,
        "forward_flops": sum(b.cost.forward_flops for b in blocks),
        "backward_flops": sum(b.cost.backward_flops for b in blocks),
        "forward_traffic_bytes": sum(b.cost.forward_traffic_bytes for b in blocks),
        "backward_traffic_bytes": sum(b.cost.backward_traffic_bytes for b in blocks),
        "launches": sum(b.cost.launches for b in blocks),
    }


def _bytes(node: fx.Node) -> int:
    return sum(t.numel() * t.element_size() for t in value_tensors(node.meta.get("val")))


def _tensor(node: fx.Node, graph: OpGraph, requires_grad: bool | None = None, name: str = "") -> TensorSpec:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise PlanError(
            f"{node.name} ({node.meta.get('source', '')}) crosses a stage border but is a {type(value).__name__}, "
            "not a tensor; keep its producer and its reader in one stage"
        )
    grad = value.requires_grad if requires_grad is None else requires_grad
    return TensorSpec(name or node.name, tuple(value.shape), _name(value.dtype), grad)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _compute_dtype(tensor: torch.Tensor, graph: OpGraph) -> str:
    return _name(graph.param_dtype if graph.param_dtype is not None and tensor.is_floating_point() else tensor.dtype)


def _title(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


__all__ = ["COMPUTE_DTYPES", "Stage", "build_stages", "dtype_bytes"]
