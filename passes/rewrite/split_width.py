"""`split-width`: what linear layers compute is divided among the members of a team (Megatron-LM 3).

In: the op graph. Out: a graph of what one member computes: some columns of the first products of a region, its part of
what is computed of them, such as some heads of attention, and its rows of the last products, whose summands the team
adds up (`sum_parts`; in backward the gradients of what the region reads). `regions.py` finds regions. Of a layer of
experts a member has some (`member_experts.py`), and of a vocabulary some rows (`member_tables.py`). All members have
the rest of the model, with the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from ...graph.divide.exchanges import (
    copy_written_results,
    insert_exchange,
    is_exchange,
    member_input,
    share_weight,
    source_of,
)
from ...graph.divide.local import arguments_for_shape
from ...graph.divide.member_experts import add_team_part, divide_experts
from ...graph.divide.member_tables import dividable_tables, divide_table
from ...graph.divide.placements import Placement
from ...graph.divide.regions import WideProduct, WidthRegion, as_function, find_regions
from ...graph.edit import Arguments, GraphEdit, copy_graph, erase, read_instead, set_arguments
from ...graph.experts.layers import ExpertLayer, find_expert_layers
from ...graph.kernels.call_node import call_node
from ...graph.layers import find_blocks
from ...graph.operators.calls import names_sizes
from ...graph.opgraph import OpGraph, value_tensors
from ...graph.tables.tables import TokenTable
from ...ir.errors import PassError
from ...ir.program import RowPart
from ..decisions import Decision, Width
from ..draft import Draft
from .graph_pass import GraphPass
from .rows_in_parts import device_room, refused_by_optimizer

PartOfModel = WidthRegion | ExpertLayer | TokenTable
ROWS = 0  # the dimension along which the rows of all members are put together


@dataclass(frozen=True)
class SplitWidth(GraphPass):
    """`team`: the number of members."""

    name: ClassVar[str] = "split-width"
    rank: ClassVar[int] = 13
    # what members of a team compute parts of
    decides: ClassVar[tuple[Decision, ...]] = (Decision("width", Width, Width()),)
    team: int = 2

    def __post_init__(self) -> None:
        if self.team < 1:
            raise PassError(f"pass {self.name!r}: option team={self.team}; it is at least 1")

    def plan(self, draft: Draft) -> Width:
        """Raises `PassError` where nothing of the model can be divided among the members."""
        if self.team == 1:
            return Width()
        _refuse(draft, self.team)
        regions = _parts_of_draft(draft, self.team)
        kept = [name for name, region in regions.items() if not _refused_by_optimizer(draft, region)]
        kept = [name for name in kept if _is_worth_a_sum(regions[name], regions, draft.graph)]
        while kept and (whole := _uncut(*_divide(draft, kept, self.team))):
            kept = [name for name in kept if name not in whole]
        if not kept:
            refused = next((_refused_by_optimizer(draft, region) for region in regions.values()), "")
            refused = refused or _parts_refusal(draft.graph)
            near = next((n for n in range(self.team - 1, 1, -1) if _parts_of_model(draft.graph, n)), 1)
            why = refused or (
                "no linear layers of this model follow each other so that members could have some columns of the first "
                f"and the same rows of the last; the nearest team that can has {near}"
            )
            raise PassError(f"split-width{{team={self.team}}}: {why}")
        return Width(team=self.team, regions=kept)

    def rewrite(self, draft: Draft, decision: Width) -> None:
        if decision.team == 1:
            return
        _refuse(draft, decision.team)
        regions = _parts_of_draft(draft, decision.team)
        for name in decision.regions:
            if name not in regions:
                known = ", ".join(regions) or "none"
                raise PassError(
                    f"split-width: {name!r} ends no part of this model that {decision.team} can divide; "
                    f"{_parts_refusal(draft.graph) or f'{known} do'}"
                )
            refused = _refused_by_optimizer(draft, regions[name])
            if refused:
                raise PassError(f"split-width: {name} cannot be divided: {refused}")
        graph, exchanged = _divide(draft, decision.regions, decision.team)
        whole = _uncut(graph, exchanged)
        if whole:
            raise PassError(
                f"split-width: {min(whole)} cannot be divided: what its members exchange is in the middle of a "
                "block; take it out of the plan's decision `width`"
            )
        lost = draft.graph.outputs.keys() - graph.outputs.keys()
        draft.graph = graph
        told = f"{len(decision.regions)} parts of the model are divided among {decision.team} members"
        told += f"; evaluation gives no {', '.join(sorted(lost))}, which would be whole" if lost else ""
        draft.notes[self.name] = told


def _refuse(draft: Draft, team: int) -> None:
    """Raise `PassError` for a graph that a team of this number cannot divide, or that a team divides already."""
    members = draft.graph.team
    if members > 1 and not draft.graph.apart:
        raise PassError(f"split-width: the work inside layers is divided among {members} members already")
    if members not in (1, team):
        raise PassError(
            f"split-width{{team={team}}}: {members} members have different tokens already; set team={members}"
        )
    if draft.graph.sizes or draft.graph.symbols:
        raise PassError("split-width: it takes batches of one size; leave dynamic_shapes out, or use another strategy")


def _parts_refusal(graph: OpGraph) -> str:
    """The refusal to divide parameters that an earlier pass has divided; empty where there are none."""
    rows = [part.part.parameter for part in graph.parts.values() if isinstance(part.part, RowPart)]
    if not rows:
        return ""
    names = ", ".join(dict.fromkeys(rows))
    return (
        f"{names}: in parts already, which stay whole; put split-width before split-vocabulary and split-experts, "
        "which then take what members leave whole, and leave split-linear out"
    )


def _divide(draft: Draft, names: Sequence[str], team: int) -> tuple[OpGraph, dict[str, set[fx.Node]]]:
    """A copy of the graph in which members divide these parts, and the exchanges of each. The last one is remembered,
    as a rewrite asks again for what its plan has found."""
    key, last = (tuple(names), team, device_room(draft)), "divided"
    if draft.graph.known.get(last, (None,))[0] != key:
        draft.graph.known[last] = key, _divide_copy(draft, names, team)
    found: tuple[OpGraph, dict[str, set[fx.Node]]] = draft.graph.known[last][1]
    return found


def _divide_copy(draft: Draft, names: Sequence[str], team: int) -> tuple[OpGraph, dict[str, set[fx.Node]]]:
    graph = copy_graph(draft.graph)
    regions = _parts_of_model(graph, team)
    member: fx.Node | None = None
    now: dict[fx.Node, fx.Node] = {}  # the new values in the place of divided products
    exchanged: dict[str, set[fx.Node]] = {}
    for name in sorted(names, key=lambda name: isinstance(regions[name], TokenTable)):  # tables are found anew
        region, before = regions[name], set(filter(is_exchange, graph.nodes))
        if isinstance(region, WidthRegion):
            _Divided(graph, region, team, now).write()
            exchanged[name] = set(filter(is_exchange, graph.nodes)) - before
            continue
        member = member or member_input(graph)
        if isinstance(region, TokenTable):
            graph.rebuild()
            divide_table(graph, name, member, team, device_room(draft))
        else:
            divide_experts(graph, region, member, team)
        exchanged[name] = set(filter(is_exchange, graph.nodes)) - before
    erase(graph, [node for node in graph.nodes if node.op == "get_attr" and not node.users])
    graph.team = team
    copy_written_results(graph)
    graph.rebuild()  # over what its nodes read now
    return graph, exchanged


def _uncut(graph: OpGraph, exchanged: dict[str, set[fx.Node]]) -> set[str]:
    """The parts of which an exchange is read in the block that gives its value, or in an earlier one: no stage could be
    cut there, as something else holds the block together."""
    home = {node: i for i, block in enumerate(find_blocks(graph)) for node in block.nodes}

    def is_cut(node: fx.Node) -> bool:
        return all(home.get(user, len(home)) > home.get(source_of(node), -1) for user in node.users)

    return {name for name, nodes in exchanged.items() if not all(map(is_cut, nodes))}


def _parts_of_draft(draft: Draft, team: int) -> dict[str, PartOfModel]:
    """The same of a draft's graph, which nothing edits, and of which a rewrite asks after its plan."""
    key = ("parts", team)
    if key not in draft.graph.known:
        draft.graph.known[key] = _parts_of_model(draft.graph, team)
    found: dict[str, PartOfModel] = draft.graph.known[key]
    return found


def _parts_of_model(graph: OpGraph, team: int) -> dict[str, PartOfModel]:
    """The parts of a model that members can divide: regions by the name of a weight, layers of experts by the
    name of their module, and tables that no region divides."""
    found: dict[str, PartOfModel] = {region.name: region for region in find_regions(graph, team)}
    used = {p.weight for r in found.values() if isinstance(r, WidthRegion) for p in (*r.columns, *r.rows)}
    layers = () if graph.apart else find_expert_layers(graph).items()  # split-context shares these out
    found |= {name: layer for name, layer in layers if not layer.refusal and layer.experts % team == 0}
    return found | {name: table for name, table in dividable_tables(graph, team).items() if name not in used}


def _is_worth_a_sum(region: PartOfModel, regions: dict[str, PartOfModel], graph: OpGraph) -> bool:
    """Whether a table is as large as what is divided anyway, or a head's: a small one, such as of positions, costs less
    on every member than a sum of what is looked up."""
    if not isinstance(region, TokenTable) or region.heads:
        return True
    parameters = graph.parameters()
    wide = [p.weight for r in regions.values() if isinstance(r, WidthRegion) for p in (*r.columns, *r.rows)]
    return region.value.numel() >= max((parameters[name].numel() for name in wide), default=0)


def _refused_by_optimizer(draft: Draft, region: PartOfModel) -> str:
    parameters = draft.graph.parameters()
    if isinstance(region, ExpertLayer):
        names = list(region.weights)
    elif isinstance(region, TokenTable):
        names = [region.name, *region.biases]
    else:
        products = (*region.columns, *region.rows)
        names = [name for product in products for name in (product.weight, product.bias) if name]
    return next(filter(None, (refused_by_optimizer(draft, name, parameters[name]) for name in names)), "")


class _Divided:
    """One region, rewritten to what a member computes of it."""

    def __init__(self, graph: OpGraph, region: WidthRegion, team: int, now: dict[fx.Node, fx.Node]):
        self.graph, self.region, self.team, self.now, self.apart = graph, region, team, now, graph.apart
        self.parameters = graph.parameters()
        self.sized = {node for node in region.inside if names_sizes(graph, node)}
        self.shared: dict[fx.Node, fx.Node] = {}
        self.weights: dict[str, fx.Node] = {}

    def write(self) -> None:
        region = self.region
        for product, blocks in region.columns.items():
            self.column(product, blocks)
        for node, places in region.inside.items():
            self.set_shapes(self.with_rows_of_all(node) if self.apart else self.with_shared_weights(node), places)
        for product, blocks in region.rows.items():
            self.row(product, blocks)

    def column(self, product: WideProduct, blocks: int) -> None:
        edit = GraphEdit(self.graph, product.node)
        hidden = self.now.get(product.hidden, product.hidden)
        if hidden not in self.shared and self.apart:
            self.shared[hidden] = insert_exchange(edit, hidden, Placement.PART, Placement.SHARED, self.team, ROWS)
        elif hidden not in self.shared and hidden.meta["val"].requires_grad:  # else it has no gradient to add up
            self.shared[hidden] = insert_exchange(edit, hidden, Placement.WHOLE, Placement.SHARED, self.team)
        hidden = self.shared.get(hidden, hidden)
        weight = self.part(edit, product.weight, product.out_dim, blocks)
        bias = self.part(edit, product.bias, 0, blocks) if product.bias else None
        self.put(product.node, self.product(edit, product, hidden, weight, bias))

    def with_rows_of_all(self, node: fx.Node) -> fx.Node:
        """A node that reads the rows of all members. Gradients of weights that it reads whole are added up anyway."""
        read_instead(node, self.region.own_rows)
        return node

    def with_shared_weights(self, node: fx.Node) -> fx.Node:
        """A node that reads trained weights whole, as members share them."""
        parameters = self.graph.node_parameters(node)
        if node.op == "call_module" and any(weight.requires_grad for weight in parameters.values()):
            node = self.norm(node, {name.rpartition(".")[2]: name for name in parameters})
        for read in [n for n in node.all_input_nodes if n.op == "get_attr" and n.meta["val"].requires_grad]:
            if read.target in self.parameters:
                read_instead(node, {read: self.shared_weight(str(read.target))})
        return node

    def norm(self, node: fx.Node, names: dict[str, str]) -> fx.Node:
        """The function of a norm's module, whose weights are nodes, in its place."""
        found = as_function(self.graph, node)
        assert found is not None
        function, shape, eps = found
        edit = GraphEdit(self.graph, node)
        weights = {
            key: edit.parameter(name, self.parameters[name])
            for key, name in names.items()
        }
        hidden = node.args[0] if node.args else node.kwargs["input"]
        made = edit.call(function, hidden, shape, **weights, eps=eps)
        made.meta["val"] = node.meta["val"]  # of all members, until it gets the shapes of one
        edit.replace(node, made)
        return made

    def shared_weight(self, name: str) -> fx.Node:
        """A weight whose gradients members add up. It is read before the region begins, in the block that gives what
        the region's first product reads."""
        if name not in self.weights:
            hidden = next(iter(self.region.columns)).hidden
            edit = GraphEdit(self.graph, self.now.get(hidden, hidden))
            value = self.parameters[name]
            read = edit.parameter(name, value)
            self.weights[name] = edit.call(share_weight, edit.call(torch.clone, read), self.team)
        return self.weights[name]

    def row(self, product: WideProduct, blocks: int) -> None:
        edit = GraphEdit(self.graph, product.node)
        weight = self.part(edit, product.weight, product.in_dim, blocks)
        found = self.product(edit, product, self.now.get(product.hidden, product.hidden), weight, None)
        if self.apart:
            found = insert_exchange(edit, found, Placement.SUMMAND, Placement.PART, self.team, ROWS)
        else:
            found = insert_exchange(edit, found, Placement.SUMMAND, Placement.WHOLE, self.team)
        if product.bias:
            value = self.parameters[product.bias]
            found = edit.call(torch.add, found, edit.parameter(product.bias, value))
        self.put(product.node, found)

    def product(
        self, edit: GraphEdit, product: WideProduct, hidden: fx.Node, weight: fx.Node, bias: fx.Node | None
    ) -> fx.Node:
        if not product.adds_first:
            return edit.call(F.linear, hidden, weight, bias)
        return edit.call(torch.mm, hidden, weight) if bias is None else edit.call(torch.addmm, bias, hidden, weight)

    def put(self, old: fx.Node, new: fx.Node) -> None:
        GraphEdit(self.graph, old).replace(old, new)
        self.now[old] = new

    def part(self, edit: GraphEdit, name: str, dim: int, blocks: int) -> fx.Node:
        """A read of a member's part of a parameter."""
        whole = self.parameters[name]
        part = add_team_part(self.graph, name, whole, dim, self.team, blocks)
        return edit.parameter(part, self.graph.parts[part].tensor)

    def set_shapes(self, node: fx.Node, places: Sequence[tuple[int, int]]) -> None:
        """Give a node the shapes of one member."""
        edit = GraphEdit(self.graph, node)
        wholes = list(value_tensors(node.meta["val"]))
        wanted = [self.local(tensor.shape, dim) for tensor, (dim, _) in zip(wholes, places, strict=True)]
        made: Any = None
        for args, kwargs in self.arguments(node, wanted):
            made = _run_node(edit, node, args, kwargs)
            if made is not None and [list(tensor.shape) for tensor in value_tensors(made)] == wanted:
                set_arguments(node, args, kwargs)
                node.meta["val"] = made
                node.meta.pop("dims", None)
                return
        found = "fails" if made is None else f"gives {[list(tensor.shape) for tensor in value_tensors(made)]}"
        raise PassError(
            f"split-width: {node.meta['source'] or node.name} {found} on what one of {self.team} members has, not "
            f"{wanted}; leave {self.region.name} out of the plan's decision `width`"
        )

    def local(self, shape: Sequence[int], dim: int) -> list[int]:
        sizes = [size // self.team if i == dim else int(size) for i, size in enumerate(shape)]
        return [sizes[ROWS] * self.team, *sizes[1:]] if self.apart else sizes

    def arguments(self, node: fx.Node, wanted: list[list[int]]) -> Iterator[Arguments]:
        """Ways to call a node on a member's part: with the shape of the result, as it is, with sizes of a member."""
        args, kwargs = node.args, dict(node.kwargs)
        if node in self.sized:
            yield from arguments_for_shape(args, kwargs, node.meta["val"].shape, wanted[0], is_open=False)
        else:
            yield args, kwargs

        def smaller(value: Any) -> Any:
            return value // self.team if type(value) is int and value >= self.team else value

        if len(args) > 1:
            yield (args[0], fx.node.map_aggregate(args[1], smaller), *args[2:]), kwargs


def _run_node(edit: GraphEdit, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """The result of a node on other arguments; None where it fails."""
    given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    try:
        with edit.fake_mode, torch.set_grad_enabled(not node.meta["no_grad"]), edit.autocast():
            return call_node(edit.graph, node, given, named, lambda t: torch.empty(t.shape, dtype=t.dtype))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
