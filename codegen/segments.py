"""Cuts a stage graph into calls of the user's blocks, each printed as a class of its own, and the nodes around them.

In: nodes with `block` in their meta. Out: `BlockCall`s and loose nodes, in an order that computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from ..ir.calls import function_name
from ..ir.edges import reads, storage_root, written_roots
from ..ir.names import is_index
from .paths import is_under, owners

MIN_NODES = 12  # of a block outside of a list
_SWITCHES = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast"}


@dataclass(eq=False)
class BlockCall:
    """One call of a block. `inputs` are nodes outside of it in order of use, `outputs` nodes inside of it in order."""

    path: str
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


CallOrNode = fx.Node | BlockCall


def is_switch(node: fx.Node) -> bool:
    """Whether a node turns gradients or autocast on or off; the text says so with `with` instead."""
    return node.op == "call_function" and function_name(node.target) in _SWITCHES


def item_reads(item: CallOrNode) -> list[fx.Node]:
    return item.inputs if isinstance(item, BlockCall) else reads(item)


def segments(graph: fx.Graph) -> list[CallOrNode]:
    """The graph's nodes in order, those of each block that can be a class gathered into one `BlockCall`."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output") and not is_switch(n)]
    home = _homes(nodes)
    items = _gather(nodes, home)
    outside = _readers(graph)
    for item in items:
        if isinstance(item, BlockCall):
            inside = set(item.nodes)
            item.inputs = list(dict.fromkeys(r for n in item.nodes for r in reads(n) if r not in inside))
            item.outputs = [n for n in item.nodes if any(reader not in inside for reader in outside.get(n, ()))]
    return items


def _homes(nodes: list[fx.Node]) -> dict[fx.Node, str]:
    """The block that each node is printed in. Loose nodes of a block's module that only this block reads join it."""
    home: dict[fx.Node, str] = {}
    modules = {str(n.target) for n in nodes if n.op == "call_module"}
    for node in nodes:
        path = str(node.meta.get("block", "")).partition("#")[0]
        if path and path not in modules and _belongs(node, path):
            home[node] = path
    paths = set(home.values())
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(nodes):
        if node not in home:
            module = str(node.meta.get("module_path", ""))
            path = next((p for p in (module, *owners(module)) if p in paths), "")
            homes = {home.get(r, "") for r in readers.get(node, ())}
            homes |= {home.get(m, path) for m in node.meta.get("mutates", ())}
            if path and homes <= {path} and _belongs(node, path):
                home[node] = path
        for read in reads(node):
            readers.setdefault(read, []).append(node)
    return home


def _belongs(node: fx.Node, path: str) -> bool:
    if node.op in ("call_module", "get_attr"):
        return is_under(path, str(node.target))
    module = node.meta.get("module_path", path)
    return module == path or is_under(path, module)


def _gather(nodes: list[fx.Node], home: dict[fx.Node, str]) -> list[CallOrNode]:
    """Runs of one block become calls. Loose nodes inside of a run move before it, unless they need it."""
    items: list[CallOrNode] = []
    run: BlockCall | None = None
    between: list[fx.Node] = []
    for node in nodes:
        path = home.get(node, "")
        if not path:
            between.append(node)
            continue
        if run is None or run.path != path or not _can_precede(between, run.nodes):
            items += between
            run = BlockCall(path, [])
            items.append(run)
        else:
            items[-1:] = [*between, run]
        between = []
        run.nodes.append(node)
    items += between
    return _only_classes(items)


def _can_precede(loose: Sequence[fx.Node], run: Sequence[fx.Node]) -> bool:
    """Whether loose nodes recorded after `run` compute the same before it."""
    if not loose:
        return True
    inside, touched = set(run), {storage_root(n) for r in run for n in (r, *reads(r))}
    for node in loose:
        if any(read in inside for read in reads(node)) or node.meta.get("random") or node.meta.get("updates_buffers"):
            return False
        if not touched.isdisjoint(written_roots(node)):
            return False
    written = {root for r in run for root in written_roots(r)}
    return not any(storage_root(read) in written for node in loose for read in reads(node))


def _only_classes(items: list[CallOrNode]) -> list[CallOrNode]:
    """Blocks that are cut into several unlike pieces, or hold no member of their own, go back to loose nodes."""
    pieces: dict[str, set[int]] = {}
    for item in items:
        if isinstance(item, BlockCall):
            pieces.setdefault(item.path, set()).add(len(item.nodes))
    kept: list[CallOrNode] = []
    for item in items:
        if isinstance(item, BlockCall) and len(pieces[item.path]) == 1 and _is_worth_a_class(item) and _has_input(item):
            kept.append(item)
        else:
            kept += item.nodes if isinstance(item, BlockCall) else [item]
    return kept


def _is_worth_a_class(call: BlockCall) -> bool:
    """Whether a block has members, and is one of a list of modules or too long for the stage's own text."""
    has_members = any(n.op in ("call_module", "get_attr") for n in call.nodes)
    return has_members and (is_index(call.path.rpartition(".")[2]) or len(call.nodes) >= MIN_NODES)


def _has_input(call: BlockCall) -> bool:
    """Whether an input says on which device the block is, and, where a rematerialisation leaves a part of it out, an
    input that is then None says so."""
    inside = set(call.nodes)
    outside = [r for n in call.nodes for r in reads(n) if r not in inside]
    if any(map(is_first_only, call.nodes)) and not any(map(is_first_only, outside)):
        return False
    return any("val" not in n.meta or isinstance(n.meta["val"], torch.Tensor) for n in outside)


def _readers(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for read in reads(node):
            found.setdefault(read, []).append(node)
    return found


class Mode(NamedTuple):
    """The mode of a node: without gradients, under which setting of autocast, and whether in the first forward only."""

    no_grad: bool = False
    autocast: Any = None
    first_only: bool = False


def mode_of(node: fx.Node) -> Mode:
    """The mode in which the node was recorded, and whether a rematerialisation leaves it out."""
    return Mode(bool(node.meta.get("no_grad", False)), node.meta.get("autocast"), is_first_only(node))


def is_first_only(node: fx.Node) -> bool:
    """Whether backward needs nothing of a node, so that a rematerialisation leaves it out."""
    return bool(node.meta.get("first_only", False))
