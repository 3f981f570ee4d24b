"""The blocks of one layer of which some are parts: of its experts, or of a table's rows.

A part reads rows of a parameter (`OpGraph.parts`), which names its layer; the blocks before and after the parts belong
to the same element of a module list.
"""

from __future__ import annotations

from collections import defaultdict

from ...graph.blocks import Block
from ...graph.layers import is_in_list, list_element
from ...graph.opgraph import OpGraph
from ...ir.program import RowPart
from ..draft import Draft


def goes_on(graph: OpGraph, before: Block, after: Block) -> bool:
    """Whether one of two neighbouring blocks is a part of a layer, and the other one belongs to the same layer, or to
    the element around it."""
    parts = part_owners(graph, before), part_owners(graph, after)
    if not any(parts):
        return False
    one, other = (own or _places(graph, block) for own, block in zip(parts, (before, after), strict=True))
    return any(a[: len(b)] == b or b[: len(a)] == a for a in one for b in other)


def part_owners(graph: OpGraph, block: Block) -> set[tuple[str, ...]]:
    """The modules of whose parameters the block reads rows; none where it reads whole parameters only."""
    read = {str(node.target) for node in block.nodes if node.op == "get_attr"} & graph.parts.keys()
    parts = (graph.parts[name].part for name in read)
    return {tuple(part.parameter.split(".")[:-1]) for part in parts if isinstance(part, RowPart)}


def _places(graph: OpGraph, block: Block) -> set[tuple[str, ...]]:
    """The elements of module lists, and other modules with parameters, in which the block's nodes ran."""
    ran = {list_element(node.meta["module_path"]) for node in block.nodes if graph.node_parameters(node)}
    ran |= {place for node in block.nodes if is_in_list(place := list_element(node.meta["module_path"]))}
    return {tuple(place.split(".")) for place in ran if place}


def layer_apart(draft: Draft) -> str:
    """The first layer, or table, whose parts are stages of several devices; empty where there is none."""
    devices: dict[str, set[int]] = defaultdict(set)
    for stage, device in zip(draft.stages, draft.devices, strict=True):
        for part in (param.part for param in stage.spec.params):
            if isinstance(part, RowPart):
                devices[part.parameter.rpartition(".")[0]].add(device)
    return next((name for name, on in devices.items() if len(on) > 1), "")
