"""Stages: the part of the op graph that one device runs between two messages, as a graph of its own.

In: op graph, blocks, and which blocks make a stage. Out: `PlannedStage`s, each with the interface that programs refer
to (`StageSpec`) and a graph that code is printed from. Shared nodes (masks, position ids) are cloned into every stage
that reads them. A value that a later stage reads is an output here and an input there, whatever is between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from ..ir.errors import PassError, PlanError
from ..ir.plain_graph import PlainGraph
from ..ir.program import Exchange, ParamSpec, StageSpec, TensorSpec
from ..runtime.functions.document_borders import document_borders
from ..runtime.torch_names import NormBase
from .blocks import Block
from .boundaries import cast, narrow_nodes
from .costs.saved_classes import saved_classes
from .costs.split_backward import split_costs
from .costs.stage import cast_bytes, stage_costs
from .dataflow import Dataflow, shared_nodes
from .divide.exchanges import exchange, exchanges_of, hands_back, is_exchange, partial_before, routes_of, source_of
from .edit import copy_edges, describe
from .experts.joins import passes_through
from .forwards.first_only import skipped_nodes, unread_in
from .opgraph import OpGraph, build_module, is_check, value_tensors
from .sizes.named import compute_sizes, dims_of, names_in, show_sizes, sized_inputs


@dataclass
class PlannedStage:
    """`graph`'s placeholders are `spec.inputs`, its results `spec.outputs` then `spec.extra_outputs`. Most drafts are
    only simulated, so the graph is made on first use."""

    spec: StageSpec
    make_graph: Callable[[], fx.GraphModule]
    blocks: tuple[str, ...]

    @cached_property
    def graph(self) -> fx.GraphModule:
        return self.make_graph()


def build_stages(graph: OpGraph, blocks: Sequence[Block], partition: list[list[str]]) -> list[PlannedStage]:
    """One stage per list of block names. Raises `PassError` unless every block is in exactly one stage and
    no stage reads a value of a later one."""
    cut = _Cut(graph, blocks, partition)
    return [_Builder(cut, index).build() for index in range(len(partition))]


def build_block_stages(graph: OpGraph, blocks: Sequence[Block]) -> list[PlannedStage]:
    """Every block as a stage of its own, to be timed: shared tensors (masks) enter as inputs instead of being computed,
    so that the seconds of several blocks add up to those of a stage that holds them."""
    cut = _Cut(graph, blocks, [[block.name] for block in blocks])
    cut.drop_checks()
    cut.leaves_out = False  # what a rematerialisation leaves out depends on the stage
    given = {node for node in cut.shared if isinstance(node.meta.get("val"), torch.Tensor)}
    given = {node for node in given if node.target is not document_borders}  # made-up ones would be none
    cut.shared -= given
    cut.home.update(dict.fromkeys(given, -1))
    return [_Builder(cut, index).build() for index in range(len(blocks))]


class _Cut:
    """The whole partition: which stage computes each node, and what all stages need to know of each other."""

    def __init__(self, graph: OpGraph, blocks: Sequence[Block], partition: list[list[str]]):
        self.graph, self.partition = graph, partition
        self.home = _homes(blocks, partition)
        placed = [set(names) for names in partition]
        self.blocks = [[block for block in blocks if block.name in names] for names in placed]
        self.whole = _whole_layers(blocks, self.home)
        self.nodes: list[list[fx.Node]] = [[] for _ in partition]
        for node in graph.nodes:
            if node in self.home:
                self.nodes[self.home[node]].append(node)
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.shared = set(graph.once(shared_nodes))
        self.shared_flow = graph.once(_shared_flow)
        self.parameters, self.buffers = graph.once(OpGraph.parameters), graph.once(OpGraph.buffers)
        self.ties = graph.once(OpGraph.ties)
        self.uses: dict[str, set[int]] = {}  # parameter's first name -> the stages that have it
        for node, index in self.home.items():
            for name in graph.node_parameters(node):
                self.uses.setdefault(self.ties.get(name, name), set()).add(index)
        self.leaves_out = True
        self.live = graph.once(live_nodes)
        self.narrow = graph.once(narrow_nodes)
        self.exchanged = self._exchange_stages()
        self.checks = self._shared_checks()

    def _exchange_stages(self) -> dict[fx.Node, int]:
        """For each exchange the stage after whose forward it is made; of what is exchanged already, before whose."""
        found: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            if not is_exchange(node):
                continue
            source = source_of(node)
            readers = [self.home[user] for user in source.users if user in self.home]
            found[node] = self.home[source] if source in self.home else min(readers, default=found.get(source, 0))
            routes = routes_of(node)
            if routes is not None and found[routes] > found[node]:
                raise PassError(
                    f"stage {found[node]} gives tokens for experts ({node.meta.get('source', '')}) before it is known "
                    f"for which, as stage {found[routes]} says; that must be the same stage, or an earlier one"
                )
            for reader in (self.home[user] for user in node.users if user in self.home):
                if reader <= found[node]:
                    raise PassError(
                        f"stage {reader} reads {node.name} ({node.meta.get('source', '')}), which the members of a "
                        f"team make of what stage {found[node]} gives; that must be an earlier stage"
                    )
        return found

    def _shared_checks(self) -> list[list[fx.Node]]:
        """For each stage, the model's checks of the batch alone that run in it: the first stage that reads the same
        inputs, else the last."""
        found: list[list[fx.Node]] = [[] for _ in self.partition]
        read = [_inputs_in(self.shared_closure([a for n in nodes for a in n.all_input_nodes])) for nodes in self.nodes]
        for check in (n for n in self.graph.nodes if n in self.shared and is_check(n)):
            wanted = _inputs_in(self.shared_closure([check]))
            found[next((i for i, inputs in enumerate(read) if wanted <= inputs), len(read) - 1)].append(check)
        return found

    def drop_checks(self) -> None:
        """Leave out the model's checks: values that are made up to time a stage do not pass them."""
        self.nodes = [[n for n in nodes if not is_check(n)] for nodes in self.nodes]
        self.checks = [[] for _ in self.checks]

    def shared_closure(self, wanted: list[fx.Node]) -> set[fx.Node]:
        """The shared nodes of `wanted`, the shared nodes that they read, and those that write one of them in place."""
        roots = (node for node in wanted if node in self.shared)
        return self.shared_flow.ancestors(roots, lambda node: (a for a in node.all_input_nodes if a in self.shared))


def _shared_flow(graph: OpGraph) -> Dataflow:
    shared = graph.once(shared_nodes)
    return Dataflow(node for node in graph.nodes if node in shared)


def _inputs_in(nodes: set[fx.Node]) -> set[fx.Node]:
    return {node for node in nodes if node.op == "placeholder"}


def live_nodes(graph: OpGraph) -> set[fx.Node]:
    """Nodes through which gradients of the loss flow. Others exist for the model's further outputs, or for nothing:
    what only they read gets no gradient, rather than one of zeros, as in eager PyTorch."""
    flow = Dataflow(graph.nodes)

    def operands(node: fx.Node) -> Iterator[fx.Node]:
        yield from (arg for arg in node.all_input_nodes if flow.writers(arg) or _requires_grad(arg))
        before = partial_before(node)
        if before is not None:
            yield before

    return flow.ancestors([graph.outputs["loss"]], operands)


def _requires_grad(node: fx.Node) -> bool:
    return any(tensor.requires_grad for tensor in value_tensors(node.meta.get("val")))


def _homes(blocks: Sequence[Block], partition: list[list[str]]) -> dict[fx.Node, int]:
    by_name = {block.name: block for block in blocks}
    home: dict[fx.Node, int] = {}
    placed: set[str] = set()
    for index, names in enumerate(partition):
        if not names:
            raise PassError(f"stage {index} holds no block")
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


def _whole_layers(blocks: Sequence[Block], home: dict[fx.Node, int]) -> set[str]:
    """Layers whose operators are all in one stage."""
    found: dict[str, set[int]] = {}
    for block in blocks:
        found.setdefault(block.layer, set()).add(home[block.nodes[0]])
    return {layer for layer, stages in found.items() if layer and len(stages) == 1}


class _Builder:
    """Makes one stage."""

    def __init__(self, cut: _Cut, index: int):
        self.cut, self.graph, self.home, self.index = cut, cut.graph, cut.home, index
        self.is_last = index == len(cut.partition) - 1
        self.without: frozenset[fx.Node] = frozenset()  # what a rematerialisation leaves out
        self.unread: frozenset[fx.Node] = frozenset()  # of parts whose results it does not make

    def build(self) -> PlannedStage:
        own = self.cut.nodes[self.index]
        given = {name: node for name, node in self.graph.outputs.items() if self._is_mine(node)}
        results = {name: source_of(node) if is_exchange(node) else node for name, node in given.items()}
        exchanges = [node for node, index in self.cut.exchanged.items() if index == self.index]
        read = [a for n in own for a in n.all_input_nodes]
        outside = self.cut.shared_closure([*read, *results.values(), *self.cut.checks[self.index]])
        elsewhere = {a for a in read if self.home.get(a, self.index) != self.index or is_exchange(a)}
        sources = {source_of(n) for n in exchanges}
        elsewhere |= {n for n in sources if is_exchange(n) and n not in exchanges}
        routes = {routes_of(n) for n in exchanges} - {None, *exchanges}
        boundary = self._sort(elsewhere | {n for n in routes if n is not None})
        loaded = [n for n in outside if n.op == "placeholder"]
        body = self._sort({*own, *(n for n in outside if n.op != "placeholder")})
        if self.cut.leaves_out:
            shared = [n for n in body if n in self.cut.shared]
            self.without = skipped_nodes(self.cut.blocks[self.index], set(body), shared)
            self.unread = unread_in(self.cut.blocks[self.index], set(body))
        unneeded = [n for n in boundary if all(self.home.get(u) != self.index or u in self.without for u in n.users)]
        able = [n for n in boundary if n not in unneeded and n not in sources and not self.graph.sizes]
        passing = [n for n in able if passes_through(n, self._is_here)]
        batch = self._with_sizes([n for n in boundary if n not in unneeded], loaded, [*own, *outside])
        leaving = {source_of(n) for n in exchanges if n not in given.values()}
        sent = [n for n in own if n in leaving or any(self.home.get(u, self.index) > self.index for u in n.users)]
        loss = results.pop("loss", None)
        outputs = [*sent, *([loss] if loss is not None and loss not in sent else [])]
        module = partial(self._module, [*boundary, *batch], body, [*outputs, *results.values()], set(sent), unneeded)
        spec = self._spec(boundary, batch, outputs, results, loss, body)
        pairs = [(before, n) for n in outputs if (before := partial_before(n)) in boundary]
        spec = replace(
            spec,
            exchanges=tuple(self._exchange(n, given) for n in exchanges),
            handed=tuple((before.name, n.name) for before, n in pairs if before is not None and n in self.cut.live),
            passing=tuple(n.name for n in passing),
        )
        if spec.again is not None:
            spec = replace(spec, again=replace(spec.again, inputs=tuple(n.name for n in unneeded)))
        return PlannedStage(spec, module, tuple(self.cut.partition[self.index]))

    def _is_here(self, node: fx.Node) -> bool:
        """Whether the stage runs a node."""
        return self.home.get(node) == self.index

    def _with_sizes(self, boundary: list[fx.Node], batch: list[fx.Node], body: list[fx.Node]) -> list[fx.Node]:
        """The inputs of the batch that are loaded, with one for each size that the stage needs and no other input
        has."""
        if not self.graph.sizes and not self.graph.symbols:
            return self._sort(batch)
        needed = set[str]().union(*(names_in((n.args, n.kwargs, n.meta.get("eval_args"))) for n in body))
        more = []
        for name in sorted(needed - sized_inputs([*boundary, *batch])):
            more.append(next(n for n in self.graph.nodes if n.op == "placeholder" and name in sized_inputs([n])))
        return self._sort({*batch, *more})

    def _sort(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.cut.order.__getitem__)

    def _exchange(self, node: fx.Node, given: dict[str, fx.Node]) -> Exchange:
        """An exchange, with what it makes as its readers take it. `given`: the model's outputs here, by their names."""
        result = replace(self._crossing(node, None if node in self.cut.live else False), order=())
        extra = next((name for name, output in given.items() if output is node and name != "loss"), None)
        return exchange(node, result) if extra is None else replace(exchange(node, result), source=extra)

    def _is_mine(self, node: fx.Node) -> bool:
        if is_exchange(node):
            return self.cut.exchanged[node] == self.index
        return self.home.get(node) == self.index or (node not in self.home and self.is_last)

    def _module(
        self, inputs: list[fx.Node], body: list[fx.Node], outputs: list[fx.Node], sent: set[fx.Node],
        unneeded: list[fx.Node],
    ) -> fx.GraphModule:  # fmt: skip
        graph = PlainGraph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            held = copies[node] = graph.placeholder(node.name)
            describe(held, node.meta, node.meta["val"], random=False, first_only=node in unneeded)  # drawn elsewhere
        for node in inputs:
            if node in self.cut.narrow:
                copies[node].meta["val"] = node.meta["val"].to(self.graph.boundary_dtype)
                copies[node] = cast(graph, copies[node], node, node.meta["val"].dtype)
        block_of = {n: block for block in self.cut.blocks[self.index] for n in block.nodes}
        for node in body:
            copy = copies[node] = graph.node_copy(node, copies.__getitem__)
            block = block_of.get(node)
            copy.meta["block"] = self._printed_as(block) if block else ""
            copy.meta["block_hash"] = block.hash if block else ""
            copy.meta["first_only"], copy.meta["unread"] = node in self.without, node in self.unread
            copy_edges(node, copy, copies.get)
        graph.output(tuple(self._output(graph, copies[n], n, n in sent) for n in outputs))
        compute_sizes(graph)
        show_sizes(graph)
        return build_module(self.graph.model, graph, self.graph.unregistered_tensors)

    def _output(self, graph: fx.Graph, copy: fx.Node, node: fx.Node, is_sent: bool) -> fx.Node:
        dtype = self.graph.boundary_dtype
        return cast(graph, copy, node, dtype) if is_sent and dtype is not None and node in self.cut.narrow else copy

    def _printed_as(self, block: Block) -> str:
        """The layer that a node is printed in; operators of a layer that is cut are printed in the stage's own text."""
        if not block.layer:
            return block.name
        return block.layer if block.layer in self.cut.whole else ""

    def _spec(
        self,
        boundary: list[fx.Node],
        batch: list[fx.Node],
        outputs: list[fx.Node],
        extra: dict[str, fx.Node],
        loss: fx.Node | None,
        body: list[fx.Node],
    ) -> StageSpec:
        trains = (None if self._is_live(n, inside=True) else False for n in boundary)
        inputs = [*map(self._crossing, boundary, trains), *(self._tensor(n, False) for n in batch)]
        trained, buffers = self._own_tensors(body)
        ties = self.cut.ties
        written = {ties.get(name, name) for node in body for name in node.meta.get("updates_buffers", ())}
        changing = [b.name for b in buffers if ties.get(b.name, b.name) in written]
        held = [n for n in body if n.op == "get_attr"]
        saved, absent = saved_classes(self.graph, self.cut.blocks[self.index], body, self.without, self.unread)
        costs = stage_costs(
            self.cut.blocks[self.index],
            [*(n for n in boundary if n not in self.cut.narrow), *batch, *held],
            outputs,
            [self._gradient_bytes(block) for block in self.cut.blocks[self.index]],
            sum(i.bytes for i in inputs if i.requires_grad),
            sum(i.bytes for i in inputs if i.order),
            cast_bytes([n for n in boundary if n in self.cut.narrow], self.graph.boundary_dtype),
            cast_bytes([n for n in outputs if n in self.cut.narrow], self.graph.boundary_dtype),
            self.without,
            self.unread,
        )
        outs = [self._crossing(n, None if n is loss or self._is_live(n, inside=False) else False) for n in outputs]
        if "again" in costs:
            costs["again"] = replace(costs["again"], calls=absent)
        return StageSpec(
            name=f"stage{self.index}",
            inputs=tuple(inputs),
            outputs=tuple(outs),
            extra_outputs=tuple(self._tensor(n, False, name) for name, n in extra.items()),
            params=tuple(trained),
            buffers=tuple(buffers),
            loss=loss.name if loss is not None else None,
            rematerialisable=not self._reads_what_it_writes(body),
            draws=any(n.meta.get("random") for n in body),
            changing_buffers=tuple(changing),
            repeated_buffers=tuple(n for n in changing if ties.get(n, n) in self.graph.repeated_buffers),
            pointwise_again=self.graph.pointwise_again,
            title=_title(self.cut.partition[self.index]),
            saved=saved,
            **split_costs(
                self.graph,
                self.cut.blocks[self.index],
                body,
                [node for node, spec in zip(boundary, inputs) if spec.requires_grad],
                [node for node, spec in zip(outputs, outs) if spec.requires_grad],
            ),
            **costs,
        )

    def _crossing(self, node: fx.Node, requires_grad: bool | None) -> TensorSpec:
        """A value as it is between stages."""
        spec, dtype = self._tensor(node, requires_grad), self.graph.boundary_dtype
        return replace(spec, dtype=_name(dtype)) if dtype is not None and node in self.cut.narrow else spec

    def _tensor(self, node: fx.Node, requires_grad: bool | None = None, name: str = "") -> TensorSpec:
        """With `requires_grad` None the spec takes the value's own."""
        value: Any = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise PlanError(
                f"{node.name} ({node.meta.get('source', '')}) crosses a stage border but is a {type(value).__name__}, "
                "not a tensor; keep its producer and its reader in one stage"
            )
        grad = value.requires_grad if requires_grad is None else requires_grad
        dims = dims_of(node, self.graph.sizes)
        return TensorSpec(name or node.name, tuple(value.shape), _name(value.dtype), grad, _order(value), dims)

    def _is_live(self, node: fx.Node, inside: bool) -> bool:
        """Whether a gradient of the node comes from its readers inside, or outside, this stage."""
        if not inside and any(user in self.cut.live for user in (*exchanges_of(node), *hands_back(node))):
            return True
        here = {user for user in node.users if self.home.get(user, self.index) == self.index and not is_exchange(user)}
        return any(user in self.cut.live for user in node.users if (user in here) == inside)

    def _own_tensors(self, body: list[fx.Node]) -> tuple[list[ParamSpec], list[ParamSpec]]:
        """Parameters and buffers that the stage's nodes use, each object once, under its first name here."""
        found: dict[str, ParamSpec] = {}
        held: dict[str, ParamSpec] = {}
        for node in body:
            for name, tensor, is_parameter in self._tensors_of(node):
                canonical = self.cut.ties.get(name, name)
                shape = tuple(tensor.shape)
                if not is_parameter:
                    is_models = name not in self.graph.constants
                    held.setdefault(name, ParamSpec(name, shape, _name(tensor.dtype), False, is_models))
                elif canonical not in found:
                    uses = self.cut.uses[canonical]
                    owner, shared = min(uses) == self.index, len(uses) > 1  # the first stage counts and saves it
                    dtype = _name(self.graph.compute_dtype(tensor))
                    hook = self.graph.hooks.get(canonical, ())
                    change = self.graph.changes.get(canonical)
                    calls = change.calls if change is not None else ()
                    row = self.graph.parts.get(name)
                    part = row.part if row is not None else None
                    sums = _name(self.graph.gradient_dtype(tensor)) if tensor.requires_grad else dtype
                    found[canonical] = ParamSpec(
                        name, shape, dtype, tensor.requires_grad, owner, hook, calls, part,
                        "" if sums == dtype else sums, shared, "" if canonical == name else canonical,
                    )  # fmt: skip
        return list(found.values()), list(held.values())

    def _gradient_bytes(self, block: Block) -> dict[int, int]:
        """Parameters of a block that get gradients: identity to bytes."""
        found = [p for n in block.nodes for p in self.graph.node_parameters(n).values() if p.requires_grad]
        return {id(p): p.numel() * self.graph.compute_dtype(p).itemsize for p in found}

    def _tensors_of(self, node: fx.Node) -> list[tuple[str, torch.Tensor, bool]]:
        """(dotted name, tensor, whether it is a parameter) of all that a node holds."""
        name = str(node.target)
        if node.op == "call_module":
            leaf = self.graph.module.get_submodule(name)
            rows = [(f"{name}.{n}", p, True) for n, p in leaf.named_parameters(remove_duplicate=False)]
            return [*rows, *((f"{name}.{n}", b, False) for n, b in leaf.named_buffers(remove_duplicate=False))]
        if node.op == "get_attr":
            for tensors in (self.cut.parameters, self.cut.buffers, self.graph.constants):
                if name in tensors:
                    return [(name, tensors[name], tensors is self.cut.parameters)]
        return []

    def _reads_what_it_writes(self, body: list[fx.Node]) -> bool:
        """Whether anything but batch normalisation writes a buffer: a second forward would see the written value."""
        for node in body:
            if node.meta.get("updates_buffers") and not (
                node.op == "call_module" and isinstance(self.graph.module.get_submodule(str(node.target)), NormBase)
            ):
                return True
        return False


def _order(value: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a dense copy of the value in the order of memory; empty where their numbers have that order."""
    if value.is_contiguous():
        return ()
    copy = torch.empty_like(value)
    if copy.is_contiguous():
        return ()
    strides = copy.stride()
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _title(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
