"""Layers of an op graph: runs of nodes of one module, and the blocks that are made of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import torch
from torch import fx

from ..ir.edges import written_roots
from ..ir.errors import PassError
from ..ir.names import is_index
from ..ir.regions import mark_of
from .blocks import Block, node_inputs, node_outputs, structural_hash
from .dataflow import shared_nodes
from .divide.exchanges import borders, is_exchange
from .operator_blocks import main_node, operator_groups, operator_name
from .opgraph import OpGraph, is_mode_switch

NamedNodes = tuple[str, list[fx.Node]]
LEVELS = ("layer", "operator")


def find_blocks(graph: OpGraph, level: str = "layer") -> list[Block]:
    """The model's blocks, still without costs. Raises `PassError` for an unknown level."""
    if level not in LEVELS:
        raise PassError(f"coarsen: level={level!r}; allowed are {', '.join(LEVELS)}")
    layers = layer_runs(graph)
    if level != "layer" and graph.team > 1:
        raise PassError(f"coarsen: level={level} knows no teams, and the work is divided among {graph.team} members")
    if level == "layer":
        return make_blocks(graph, layers)
    layer_of = {node: name for name, nodes in layers for node in nodes}
    nodes = [node for node in graph.nodes if node in layer_of]
    groups = operator_groups(graph, nodes, _inseparable(graph, dict.fromkeys(nodes, 0)))
    mains = [main_node(graph, group) for group in groups]
    runs = _unique([(operator_name(main), group) for main, group in zip(mains, groups)])
    return make_blocks(graph, runs, [layer_of[main] for main in mains])


def make_blocks(graph: OpGraph, runs: list[NamedNodes], layers: Sequence[str] = ()) -> list[Block]:
    """Blocks with hash, inputs, outputs and parameter bytes, still without costs. `layers`: the layer of each run,
    where runs are not layers themselves."""
    blocks = []
    for i, (name, run) in enumerate(runs):
        layer = layers[i] if layers else ""
        nodes = tuple(run)
        inputs = node_inputs(nodes)
        parameters = {id(p): p for n in nodes for p in graph.node_parameters(n).values()}
        blocks.append(
            Block(
                name,
                nodes,
                structural_hash(graph, layer or name, nodes, inputs),
                tuple(inputs),
                tuple(node_outputs(nodes)),
                sum(p.numel() * graph.compute_dtype(p).itemsize for p in parameters.values()),
                layer=layer,
            )
        )
    return blocks


def layer_runs(graph: OpGraph) -> list[NamedNodes]:
    """The layers of the model and what is between them, by name, each with its nodes in recorded order."""
    runs = [piece for run in split_runs(graph) for piece in _calls(graph, run)]
    return _unique(_join_leading(graph, _join_inseparable(graph, runs)))


def split_runs(graph: OpGraph) -> list[NamedNodes]:
    """Runs of nodes of one element of a module list, or of one other module with parameters, in recorded order."""
    shared = shared_nodes(graph)
    nodes = [
        n
        for n in graph.nodes
        if n.op not in ("placeholder", "output") and n not in shared and not is_mode_switch(n) and not is_exchange(n)
    ]
    runs: list[NamedNodes] = []
    seen: set[fx.Node] = set()
    for node in _reads_late(nodes) if graph.team > 1 else nodes:
        key = list_element(node.meta.get("module_path", ""))
        read_for = list(node.users)[:1] if node.op == "get_attr" else []  # a weight is read where it is used
        met = set[fx.Node]().union(*map(borders, (node, *read_for))) - seen
        seen |= met
        if runs and not met and (key == runs[-1][0] or not (is_in_list(key) or graph.node_parameters(node))):
            runs[-1][1].append(node)
        else:
            runs.append((key, [node]))
    return runs


def _reads_late(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes, where what is exchanged is read between a parameter's read and its first reader, with the read right
    before the reader: no border is between them."""
    place = {node: i for i, node in enumerate(nodes)}
    met = list(itertools.accumulate((bool(borders(node)) for node in nodes), initial=0))
    late: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        first = min((user for user in node.users if user in place), key=place.__getitem__, default=None)
        if node.op == "get_attr" and first is not None and met[place[first]] > met[place[node]]:
            late.setdefault(first, []).append(node)
    moved = {read for reads in late.values() for read in reads}
    return [each for node in nodes if node not in moved for each in (*late.get(node, ()), node)]


def list_element(path: str) -> str:
    """The path up to its first list index; without one, or in a part of a parameter, the whole path."""
    parts = path.split(".")
    if parts[-1].endswith("]"):
        return path
    for i, part in enumerate(parts):
        if is_index(part):
            return ".".join(parts[: i + 1])
    return path


def is_in_list(key: str) -> bool:
    return is_index(key.rpartition(".")[2])


def _calls(graph: OpGraph, run: NamedNodes) -> list[NamedNodes]:
    """Cut a run with several calls of one element of a module list where its first node with parameters comes again,
    unless the calls do not depend on each other: then its weights serve all of them in one place."""
    name, nodes = run
    first = next((n for n in nodes if is_in_list(name) and graph.node_parameters(n)), None)
    pieces: list[list[fx.Node]] = [[]]
    for node in nodes:
        if first is not None and node is not first and (node.op, node.target) == (first.op, first.target):
            pieces.append([])
        pieces[-1].append(node)
    joined = pieces[:1]
    for piece in pieces[1:]:
        if _depends(name, piece, joined[-1]):
            joined.append(piece)
        else:
            joined[-1] += piece
    return [(name, piece) for piece in joined]


def _depends(name: str, later: list[fx.Node], earlier: list[fx.Node]) -> bool:
    """Whether a later call of an element reads what the earlier one computes, or what is made of that in between."""
    made = {node for node in earlier if node.op != "get_attr"}
    own = [node for node in later if is_inside(name, node)]
    return any(arg in made for node in own for arg in node.all_input_nodes)


def is_inside(key: str, node: fx.Node) -> bool:
    """Whether a node was recorded in the module of this path, or below it."""
    return f"{node.meta.get('module_path', '')}.".startswith(f"{key}.")


def _join_leading(graph: OpGraph, runs: list[NamedNodes]) -> list[NamedNodes]:
    """Join a first run without parameters to the second, so that every block has weights where the model has any."""
    if len(runs) > 1 and not any(graph.node_parameters(n) for n in runs[0][1]):
        runs[1:2] = [(runs[1][0], runs[0][1] + runs[1][1])]
        return runs[1:]
    return runs


def _join_inseparable(graph: OpGraph, runs: list[NamedNodes]) -> list[NamedNodes]:
    """Join all runs from a node to the last one that must stay with it, so that no cut falls between them."""
    home = {node: i for i, (_, nodes) in enumerate(runs) for node in nodes}
    upto = list(range(len(runs)))
    for first, last in _inseparable(graph, home):
        begin, end = sorted((home[first], home[last]))
        upto[begin] = max(upto[begin], end)
    joined: list[NamedNodes] = []
    end = -1
    for i, (name, nodes) in enumerate(runs):
        if i <= end and joined:
            joined[-1][1].extend(nodes)
        else:
            joined.append((name, list(nodes)))
        end = max(end, upto[i])
    return joined


def _inseparable(graph: OpGraph, home: dict[fx.Node, int]) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs of nodes that must be in one block, in any order."""
    pairs: list[tuple[fx.Node, fx.Node]] = []
    written = {name for node in home for name in node.meta.get("updates_buffers", ())}
    ties = graph.ties()
    written = {ties.get(name, name) for name in written}
    holder: dict[str, fx.Node] = {}
    for node in home:
        pairs += [(root, node) for root in written_roots(node)]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            pairs += [(node, user) for user in node.users]
        if node.target is operator.getitem:
            indexed = node.all_input_nodes if graph.team == 1 else node.all_input_nodes[:1]  # a team may be between
            pairs += [(arg, node) for arg in indexed]
        for name in buffers_of(graph, node):
            if ties.get(name, name) in written:
                pairs.append((holder.setdefault(ties.get(name, name), node), node))
        mark = mark_of(node)
        if mark is not None:
            pairs.append((holder.setdefault(f"part {mark.region}", node), node))
    return [(a, b) for a, b in pairs if a in home and b in home]


def buffers_of(graph: OpGraph, node: fx.Node) -> list[str]:
    if node.op == "call_module":
        leaf = graph.module.get_submodule(str(node.target))
        return [f"{node.target}.{name}" for name, _ in leaf.named_buffers(remove_duplicate=False)]
    return [str(node.target)] if node.op == "get_attr" else []


def _unique(runs: list[NamedNodes]) -> list[NamedNodes]:
    seen: dict[str, int] = {}
    named = []
    for name, nodes in runs:
        name = name or "model"
        seen[name] = seen.get(name, 0) + 1
        named.append((name if seen[name] == 1 else f"{name}#{seen[name]}", nodes))
    return named
