"""Chains of calls that one kernel can compute, for `fuse-pointwise`: pointwise calls, casts, views, and sums over the
last dimension.

In: an op graph. Out: `CallChain`s, each in one layer, with one result. No node outside a chain reads a value inside it,
so that a value that two chains read is the result of a third: it is in memory anyway. A chain counts if the values from
outside that its backward reads, which are what it saves as one call, take no more bytes than what its calls save as
written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...ir.edges import storage_root
from ...ir.regions import Region, mark_of, region_inputs
from ...runtime.functions.chains import Chain
from ...runtime.stage.operators import is_cheap
from ...runtime.torch_names import FakeTensor, FakeTensorMode, make_fx
from ..blocks import Block, structural_hash
from ..costs.block import FakeBlockRun
from ..dataflow import Dataflow, closure
from ..kernels.cuda_autocast import autocast_as
from ..layers import layer_runs
from ..operators.calls import CallRecorder, call_key
from ..operators.record import OperatorCall, is_pointwise
from ..operators.reductions import is_over_last
from ..opgraph import OpGraph, is_check, value_tensors


@dataclass(frozen=True)
class CallChain:
    """`nodes` in order, the last of which is the result; `needed`: what backward reads of the values from outside;
    `spared_bytes`: which a forward moves as written and need not."""

    name: str
    nodes: list[fx.Node]
    needed: frozenset[fx.Node]
    spared_bytes: int


def call_chains(graph: OpGraph, device_kind: str) -> list[CallChain]:
    """The chains in order, of a graph of fixed sizes."""
    known = graph.looked.setdefault((call_chains, graph.module), {})  # a rewrite asks for what its plan has found
    if device_kind not in known:
        known[device_kind] = _Finder(graph, device_kind).chains()
    found: list[CallChain] = known[device_kind]
    return found


@dataclass(frozen=True)
class _Findings:
    """`needed`: the places of the inputs that backward reads."""

    needed: tuple[int, ...]
    spared_bytes: int


class _Finder:
    def __init__(self, graph: OpGraph, device_kind: str):
        self.graph, self.kind = graph, device_kind
        self.written = Dataflow(graph.nodes).written_by.keys()
        fakes = (t for n in graph.nodes for t in value_tensors(n.meta.get("val")) if isinstance(t, FakeTensor))
        self.mode: FakeTensorMode = next(fakes).fake_mode
        self.passes: dict[Any, bool] = {}  # by call, whether one pass over rows computes it
        self.known: dict[str, _Findings | None] = {}  # by the hash of a chain

    def chains(self) -> list[CallChain]:
        found = []
        with self.mode, autocast_as(self.kind, self.graph.autocast):
            for layer, run in layer_runs(self.graph):
                chains = filter(None, (self._chain(layer, nodes) for nodes in self._cones(run)))
                for number, (nodes, needed, spared_bytes) in enumerate(chains, start=1):
                    found.append(CallChain(f"{layer}/{number}", nodes, needed, spared_bytes))
        return found

    def _cones(self, run: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """The nodes of each result with all that only it is made of, as far as one kernel can compute these."""
        end: dict[fx.Node, fx.Node] = {}  # node -> the result of its chain
        for node in reversed(run):
            if node.op != "get_attr" and self._can_join(node):
                ends = {end.get(user) for user in node.users}
                whole = ends.pop() if len(ends) == 1 else None
                if whole is not None:
                    end[node] = whole
                elif self._can_end(node):
                    end[node] = node
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in run:
            if node in end:
                members.setdefault(end[node], []).append(node)
        return [self._trim(nodes) for nodes in members.values()]

    def _trim(self, nodes: list[fx.Node]) -> list[fx.Node]:
        """A chain without views of all that enters it, which cost nothing where they are."""
        inside = set(nodes)
        for node in nodes:
            root = storage_root(node)
            if root not in inside and root is not node and _size(root) == _size(node):
                inside.discard(node)
        return [node for node in nodes if node in inside]

    def _can_join(self, node: fx.Node) -> bool:
        meta = node.meta
        changes = meta.get("random") or meta.get("mutates") or meta.get("updates_buffers") or "eval_args" in meta
        apart = meta.get("no_grad") or meta.get("autocast") is not None or mark_of(node) is not None
        if changes or apart or is_check(node) or not isinstance(meta.get("val"), torch.Tensor):
            return False
        if any(not isinstance(n.meta["val"], torch.Tensor) for n in node.all_input_nodes):
            return False
        if any(storage_root(n) in self.written for n in (node, *node.all_input_nodes)):
            return False
        return self._passes(node)

    def _can_end(self, node: fx.Node) -> bool:
        value = node.meta["val"]
        dense = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        is_own = storage_root(node) is node and dense and value.dim() > 1
        return bool(is_own and value.requires_grad and value.is_floating_point())

    def _passes(self, node: fx.Node) -> bool:
        """Whether all calls of a node are such that one pass over rows computes them."""
        if node.op == "call_module" and self.graph.node_parameters(node):
            return False
        values = {n: n.meta["val"] for n in node.all_input_nodes}
        key = call_key(self.graph, node, node.args, node.kwargs, lambda t: (tuple(t.shape), t.stride(), t.dtype))
        if key is None:
            return False
        if key not in self.passes:
            runner = FakeBlockRun(self.graph, Block("", (node,)), self.mode, "cpu")
            self.passes[key] = False
            with torch.no_grad(), CallRecorder() as recorder, suppress(Exception):  # of any kind, by the user's calls
                runner.call(node, *fx.map_arg((node.args, node.kwargs), values.__getitem__))
                self.passes[key] = all(map(_is_one_pass, recorder.calls))
        return self.passes[key]

    def _chain(self, layer: str, nodes: list[fx.Node]) -> tuple[list[fx.Node], frozenset[fx.Node], int] | None:
        if len(nodes) < 2:
            return None
        inputs = region_inputs(nodes)
        key = structural_hash(self.graph, layer, tuple(nodes), inputs)
        if key not in self.known:
            self.known[key] = self._look(nodes, inputs)
        found = self.known[key]
        return None if found is None else (nodes, frozenset(inputs[i] for i in found.needed), found.spared_bytes)

    def _look(self, nodes: list[fx.Node], inputs: list[fx.Node]) -> _Findings | None:
        """None for calls that are better left as they are written."""
        runner = FakeBlockRun(self.graph, Block("", tuple(nodes)), self.mode, "cpu")
        parts = runner.body(Region("", nodes, inputs, nodes[-1:]), {n: n.meta["val"] for n in inputs})

        def body(*operands: torch.Tensor) -> torch.Tensor:
            return parts(*operands)[0]

        operands = [n.meta["val"].detach().requires_grad_(n.meta["val"].requires_grad) for n in inputs]
        saved: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        saving = torch.autograd.graph.saved_tensors_hooks(note, lambda t: t)
        with CallRecorder() as recorder, saving, torch.enable_grad():
            result = body(*operands)
        calls = [call for call in recorder.calls if not call.func.is_view]
        needed = _read_places(body, operands, result)
        if len(calls) < 2 or needed is None:
            return None
        for node, operand in zip(inputs, operands):
            if node.op == "get_attr":
                saved.pop(operand.untyped_storage()._cdata, None)
        own = {operands[i].untyped_storage()._cdata: operands[i] for i in needed if inputs[i].op != "get_attr"}
        if sum(t.untyped_storage().nbytes() for t in own.values()) > sum(saved.values()):
            return None
        moved = sum(_bytes(t) for call in calls for t in (*call.tensors(), *call.results()))
        return _Findings(needed, moved - sum(map(_bytes, (*operands, result))))


def _read_places(
    body: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor], result: torch.Tensor
) -> tuple[int, ...] | None:
    """The places of the operands that the gradients are made of; None where one of them gets none."""
    chain = Chain(body, tuple(range(len(operands))), "cpu", torch.is_autocast_enabled("cpu"),
                  torch.get_autocast_dtype("cpu"))  # fmt: skip
    wanted = [operand.requires_grad for operand in operands]

    def gradients(grad: torch.Tensor, *operands: torch.Tensor) -> list[torch.Tensor]:
        return chain.gradients(grad, operands, wanted)

    try:
        graph = make_fx(gradients)(torch.empty_like(result), *operands).graph
    except RuntimeError:  # an operand that no gradient reaches
        return None
    read = closure(graph.find_nodes(op="output"), lambda node: node.all_input_nodes)
    _, *given = graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(given) if node in read)


def _is_one_pass(call: OperatorCall) -> bool:
    func = call.func
    return is_cheap(func) or func.is_view or is_over_last(call) or (is_pointwise(func) and not func._schema.is_mutable)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(node: fx.Node) -> int:
    return sum(tensor.numel() for tensor in value_tensors(node.meta["val"]))
