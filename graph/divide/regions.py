"""Regions of an op graph whose width the members of a team can divide among themselves (Megatron-LM 3): products by
columns, what is computed of each column alone, and products by rows, found by what calls do and not by a model's name.

A member has some columns of each first product's weight, makes its own part of all values between, such as some heads
of attention, and has the rows of the last products' weights that meet these. What it gives is a summand of what the
last products gave, so that only sums go between members.

Where members have different tokens or rows already (`OpGraph.apart`), a region computes with those of all members, put
together along dimension 0 as further rows, and each member keeps its own rows of the sum. So nothing inside a region
may let rows meet, and all that it reads beside is the same on all members, or a member's rows of such a value.

In: the op graph and the number of members. Out: `WidthRegion`s, no product in two of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ...runtime.functions import own_tokens
from ..dataflow import Dataflow
from ..follow.engine import Follower
from ..operators.states import ByRow
from ..opgraph import OpGraph, is_mode_switch, value_tensors
from ..products.products import WideProduct, find_products, parameter_readers
from .exchanges import MEMBER, is_exchange

MOST_BLOCKS = 4  # that one weight holds side by side, such as a block for queries, keys and values each


@dataclass(frozen=True)
class WidthRegion:
    """`columns`: products of which members have columns, each with its number of blocks; `rows`: those of which they
    have rows; `inside`: what is computed between, with the dimension of each result that members divide and the number
    of places along it that are next to each other; `own_rows`: what is read beside of a member's rows, with the value
    of all rows."""

    columns: dict[WideProduct, int]
    rows: dict[WideProduct, int]
    inside: dict[fx.Node, tuple[tuple[int, int], ...]]
    own_rows: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The weight of its first product by rows."""
        return next(iter(self.rows)).weight


def find_regions(graph: OpGraph, team: int) -> list[WidthRegion]:
    """The regions that `team` members can divide, in order."""
    products = {product.node: product for product in find_products(graph)}
    readers, differing = parameter_readers(graph), _differing(graph) if graph.apart else set[fx.Node]()
    found: list[WidthRegion] = []
    used: set[WideProduct] = set()
    for product in products.values():
        if product in used:
            continue
        region = _region(graph, products, product, team)
        if region is not None and graph.apart:
            region = _gather_rows(graph, region, differing)
        if region is None:
            continue
        own = {*region.columns, *region.rows}
        names = {name for p in own for name in (p.weight, p.bias) if name}
        if used & own or any(readers[name] - {p.node for p in own} for name in names):
            continue
        found.append(region)
        used |= own
    return found


def _region(graph: OpGraph, products: dict[fx.Node, WideProduct], last: WideProduct, team: int) -> WidthRegion | None:
    """The region that ends with a product, and with others that read the same values; None where there is none."""
    rows = {last}
    while True:
        above, columns = _operands(products, rows)
        inside = _made_of({c.node for c in columns}, above)
        own = {*inside, *(column.node for column in columns)}
        outside = {user for node in own for user in node.users if user not in own} - {row.node for row in rows}
        more = {products[node] for node in outside if node in products and products[node].hidden in own}
        if not columns or not outside <= {product.node for product in more}:
            return None
        if not more:
            break
        rows |= more
    if own & {*graph.outputs.values()} or any(n.meta.get("random") or is_mode_switch(n) for n in inside):
        return None
    if any(map(is_exchange, inside)):
        return None
    if any(row.hidden not in own for row in rows):
        return None
    if not _can_share(graph, inside, own, columns):
        return None
    first, last_rows = (sorted(each, key=lambda product: product.node) for each in (columns, rows))
    for blocks in range(1, MOST_BLOCKS + 1) if len(columns) == 1 else (1,):
        found = _proven(graph, dict.fromkeys(first, blocks), last_rows, inside, team)
        if found is not None:
            return found
    return None


def _can_share(graph: OpGraph, inside: list[fx.Node], own: set[fx.Node], columns: Collection[WideProduct]) -> bool:
    """Whether what is trained and read whole, of which members each have a part of the gradient, are weights alone,
    such as the weight of a norm over each head: these are shared before the region begins (`share_weight`)."""
    read = {value for node in inside for value in node.all_input_nodes if value not in own}
    trained = [value for value in read if any(tensor.requires_grad for tensor in value_tensors(value.meta["val"]))]
    modules = [node for node in inside if any(p.requires_grad for p in graph.node_parameters(node).values())]
    modules = [node for node in modules if node.op != "get_attr"]
    if not trained and not modules:
        return True
    before = [product.hidden for product in columns]
    return (
        all(value.op == "get_attr" for value in trained)
        and all(node.op == "call_module" and as_function(graph, node) is not None for node in modules)
        and all(hidden.op in ("call_function", "call_method", "call_module") for hidden in before)
    )


def as_function(graph: OpGraph, node: fx.Node) -> tuple[Any, tuple[Any, ...], float | None] | None:
    """A norm's function, the shape that it norms and its epsilon, where a node calls a module that is one."""
    leaf = graph.module.get_submodule(str(node.target))
    if type(leaf) is nn.LayerNorm:
        return F.layer_norm, leaf.normalized_shape, leaf.eps
    return (F.rms_norm, leaf.normalized_shape, leaf.eps) if type(leaf) is nn.RMSNorm else None


def _operands(products: dict[fx.Node, WideProduct], rows: set[WideProduct]) -> tuple[set[fx.Node], set[WideProduct]]:
    """The nodes that compute the operands of products, back to the products before; and these products."""
    found, columns = set[fx.Node](), set[WideProduct]()
    waiting = [row.hidden for row in rows]
    while waiting:
        node = waiting.pop()
        if node in products:
            columns.add(products[node])
        elif node not in found and node.op not in ("placeholder", "get_attr"):
            found.add(node)
            waiting += node.all_input_nodes
    return found, columns - rows


def _made_of(columns: set[fx.Node], above: set[fx.Node]) -> list[fx.Node]:
    """The nodes of `above` that are made of what products of columns give, in order."""
    found = dict.fromkeys(columns)
    for node in sorted(above):
        if any(arg in found for arg in node.all_input_nodes):
            found[node] = None
    return [node for node in found if node not in columns]


def _proven(
    graph: OpGraph, columns: dict[WideProduct, int], rows: list[WideProduct], inside: list[fx.Node], team: int
) -> WidthRegion | None:
    """The region, if each place of what the last products read follows from the same member's columns alone."""
    starts: dict[fx.Node, tuple[int, int]] = {}
    for product, blocks in columns.items():
        shape = product.node.meta["val"].shape
        if shape[-1] % (team * blocks):
            return None
        starts[product.node] = len(shape) - 1, shape[-1] // (team * blocks)
    places = _places(graph, team, starts, inside)
    if places is None:
        return None
    found = {}
    for product in rows:
        dim, inner = starts[product.hidden] if product.hidden in starts else places[product.hidden][0]
        shape = product.hidden.meta["val"].shape
        if dim != len(shape) - 1:
            return None
        found[product] = shape[-1] // (team * inner)
    return WidthRegion(columns, found, places)


def _places(
    graph: OpGraph, count: int, starts: Mapping[fx.Node, tuple[int, int]], nodes: Sequence[fx.Node]
) -> dict[fx.Node, tuple[tuple[int, int], ...]] | None:
    """The places (dim, inner) of `count` equal parts in the results of nodes, if each part follows from the same part
    of the values that enter. `starts`: the places in these; all other values are the same for all parts."""
    follower, places = Follower(graph, count, None), dict[fx.Node, tuple[tuple[int, int], ...]]()
    for node, (dim, inner) in starts.items():
        for tensor in value_tensors(node.meta["val"]):
            follower.states[id(tensor)] = ByRow(dim=dim, inner=inner)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for node in nodes:
            follower.node(node)
            states = [follower.state(tensor) for tensor in value_tensors(node.meta["val"])]
            if node in follower.found or not all(isinstance(s, ByRow) and s.order is None for s in states):
                return None
            places[node] = tuple((s.dim, s.inner) for s in states if isinstance(s, ByRow))
    return places if follower.is_clear else None


def _differing(graph: OpGraph) -> set[fx.Node]:
    """The values that may differ from member to member."""
    nodes = graph.nodes
    return Dataflow(nodes).descendants(node for node in nodes if node.target == MEMBER or is_exchange(node))


def _gather_rows(graph: OpGraph, region: WidthRegion, differing: set[fx.Node]) -> WidthRegion | None:
    """The region, if members with different rows can compute it with the rows of all."""
    products = [product.node for product in region.columns]
    own = {*products, *region.inside}
    read = dict.fromkeys(value for node in region.inside for value in node.all_input_nodes if value not in own)
    own_rows = {value: _whole_of(value, graph.team) for value in read if value in differing}
    if any(whole is None or whole in differing for whole in own_rows.values()):
        return None
    hidden = [product.hidden for product in region.columns]
    if not differing.issuperset(hidden) or any(value.meta["val"].dim() < 2 for value in hidden):
        return None
    if any(dim == 0 for places in region.inside.values() for dim, _ in places):
        return None
    rows = min(tensor.shape[0] for value in own for tensor in value_tensors(value.meta["val"]))
    sizes = {value: int(value.meta["val"].shape[0]) for value in (*products, *own_rows)}
    if any(size % rows for size in sizes.values()):
        return None
    places = _places(graph, rows, {value: (0, size // rows) for value, size in sizes.items()}, [*region.inside])
    if places is None:
        return None
    for node, each in places.items():
        if any(at != (0, t.shape[0] // rows) for t, at in zip(value_tensors(node.meta["val"]), each, strict=True)):
            return None
    return replace(region, own_rows={cut: whole for cut, whole in own_rows.items() if whole is not None})


def _whole_of(value: fx.Node, team: int) -> fx.Node | None:
    """The value of which a member has its own rows, in order; None for another value."""
    whole = value.args[0] if value.target is own_tokens and len(value.args) == 5 and value.args[3] == 0 else None
    if not isinstance(whole, fx.Node) or whole.meta["val"].shape[0] != team * value.meta["val"].shape[0]:
        return None
    return whole
