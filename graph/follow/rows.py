"""Find from op graphs where the rows of a batch depend on each other in a model's loss.

In: a function that traces the model at a number of micro-batches. Out: `RowFacts`: where rows meet, whether the loss is
a mean or a sum over rows, and which buffers forward updates whatever the rows are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Set

from pydantic import BaseModel, ConfigDict
from torch import fx

from ...ir.calls import function_name
from ...ir.errors import CaptureError
from ...runtime.torch_names import tree_leaves
from ..blocks import structural_hash
from ..dataflow import Dataflow
from ..loss_terms import LossTerm
from ..operators.states import Kind, Mixed
from ..opgraph import OpGraph, value_tensors
from .engine import Trail, follow, name_of_call, power_of, powers_of

GraphOf = Callable[[int], OpGraph]  # number of micro-batches -> op graph of one micro-batch


class Coupling(BaseModel):
    """A place where rows of a batch meet, so that the loss of a batch is not made of the losses of its parts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Kind
    operator: str = ""
    module: str = ""  # dotted path and class
    source: str = ""  # the user's line


class RowFacts(BaseModel):
    """`couplings`: where rows meet on the way to the loss, and every BatchNorm. `power`: the loss of the whole batch is
    the mean of the losses of M micro-batches times M ** power: 0 for a mean over rows, 1 for a sum. `updates`: the
    writes into buffers that no row influences: each micro-batch of a step makes them from the same values."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    couplings: tuple[Coupling, ...] = ()
    power: int = 0
    updates: tuple[Coupling, ...] = ()

    @property
    def repeated_buffers(self) -> tuple[str, ...]:
        """The buffers that are alike before each micro-batch of a step."""
        return tuple(dict.fromkeys(update.operator for update in self.updates))

    def with_each_update(self) -> RowFacts:
        """The facts where each micro-batch goes on from the buffers that the last one left."""
        return self.model_copy(update={"couplings": (*self.couplings, *self.updates), "updates": ()})

    def factor(self, num_micro_batches: int) -> float:
        """The factor of the loss of each micro-batch before the mean over them is taken."""
        return float(num_micro_batches) ** self.power


MEAN_OVER_ROWS = RowFacts()


def row_facts(
    trace: GraphOf, count: int, batch_size: int, device_kind: str = "cpu", is_whole: bool = False
) -> RowFacts:
    """The facts of a model whose global batch has `batch_size` rows; `count` is a number of micro-batches whose graph
    is needed in any case. A graph of other rows shows the numbers that the model makes of the number of rows.
    `is_whole`: the batch is never cut, so that it is traced only where the first one leaves something open."""
    if batch_size == 1:
        return RowFacts()
    graph, rows = trace(count), batch_size // count
    trail = follow(graph, rows, device_kind=device_kind)
    has_updates = any(node.meta.get("updates_buffers") and node not in trail.by_rows for node in graph.nodes)
    is_said = _says_all(trail, rows) and not has_updates
    if is_said and is_whole:
        return _facts(graph, trail)
    other_count = _other(count, batch_size)
    try:
        other, other_rows = trace(other_count), batch_size // other_count
    except CaptureError:
        return _facts(graph, trail)
    other_trail = follow(other, other_rows, device_kind=device_kind)
    powers, is_alike = powers_of(trail, rows, other_trail, other_rows), trail.has_calls_of(other_trail)
    if is_said and is_alike and not any(power != 0 for row in powers.values() for power in row):
        found = _facts(graph, trail)
    else:
        ours, theirs = _repeated_updates(graph, trail), _repeated_updates(other, other_trail)
        same = {name for name, update in ours.items() if theirs.get(name) == update}
        more, more_rows = graph, rows
        if rows == 1:  # more rows show more
            powers, more, more_rows = powers_of(other_trail, other_rows, trail, rows), other, other_rows
        found = _facts(more, follow(more, more_rows, powers, device_kind), same, graph.loss.terms)
    try:
        whole = trace(1)  # which may do what no part does
    except CaptureError:
        return found
    if count == 1 or (is_alike and goes_on({rows: graph, other_rows: other}, batch_size, whole)):
        return found
    whole_trail = follow(whole, batch_size, device_kind=device_kind)
    powers = powers_of(whole_trail, batch_size, trail, rows)
    of_whole = _facts(whole, follow(whole, batch_size, powers, device_kind), {*found.repeated_buffers})
    several = other_trail if rows == 1 else trail  # a loop over a single row adds nothing up
    is_same = trail.calls <= whole_trail.calls <= several.calls | trail.calls
    return _join(found, of_whole, is_same, str(whole.outputs["loss"].meta["source"]))


def goes_on(parts: Mapping[int, OpGraph], batch_size: int, whole: OpGraph) -> bool:
    """Whether the whole batch has the calls of its parts, with numbers that follow from those of the parts. `parts`:
    two graphs, by their rows."""
    (rows, graph), (other_rows, other) = parts.items()
    if any([*map(name_of_call, each.nodes)] != [*map(name_of_call, whole.nodes)] for each in (graph, other)):
        return False
    numbers = [_numbers(each) for each in (graph, other, whole)]
    if len({*map(len, numbers)}) > 1:  # as of sizes of each row
        return False
    along, ratio = (batch_size - rows) / (other_rows - rows), math.log(other_rows / rows)
    for a, b, c in zip(*numbers):
        power = power_of(a, b, ratio)
        is_power = power is not None and math.isclose(c, a * (batch_size / rows) ** power)
        if not is_power and not math.isclose(c, a + (b - a) * along):
            return False
    return True


def _numbers(graph: OpGraph) -> list[float]:
    given = (leaf for node in graph.nodes for leaf in tree_leaves((node.args, node.kwargs)))
    return [float(leaf) for leaf in given if isinstance(leaf, (int, float))]


def _join(facts: RowFacts, whole: RowFacts, is_same: bool, source: str) -> RowFacts:
    """The facts of a part and of the whole batch, of a model that makes other calls for other numbers of rows.
    `is_same`: whether these are the same calls, only more or fewer of them; `source`: the line of the loss."""
    is_followed = is_same and facts.power == whole.power
    counted = [] if is_followed else [Coupling(kind=Kind.ROW_COUNT, operator="loss", source=source)]
    couplings = dict.fromkeys((*facts.couplings, *whole.couplings, *counted))
    return facts.model_copy(update={"couplings": tuple(couplings)})


def _says_all(trail: Trail, rows: int) -> bool:
    """Whether a trace with other numbers of rows could not tell more."""
    if trail.loss.scale.unsure or any(kind is Kind.UNEVEN for met in trail.met.values() for kind, _ in met):
        return False
    return rows > 1 or (trail.is_clear and not trail.met and trail.loss.scale.power == 0)


def _other(count: int, batch_size: int) -> int:
    """Another number of micro-batches, the nearest of those whose micro-batches have more than one row."""
    others = [m for m in range(1, batch_size + 1) if batch_size % m == 0 and m != count]
    return min(others, key=lambda m: (m == batch_size, abs(m - count)))


def _repeated_updates(graph: OpGraph, trail: Trail) -> dict[str, Hashable]:
    """The buffers into which forward writes what neither a row nor chance influences. Their values are equal for graphs
    that update a buffer by the same calls, numbers and constants."""
    flow, found = Dataflow(graph.nodes), dict[str, Hashable]()
    writers: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        for name in node.meta.get("updates_buffers", ()):
            writers.setdefault(name, []).append(node)
    for name, written in writers.items():
        nodes = flow.sort_nodes(flow.ancestors(written))
        entering = [t for n in nodes if n.op == "placeholder" for t in value_tensors(n.meta["val"]) if t.dim()]
        if trail.by_rows.isdisjoint(written) and not entering and not any(n.meta.get("random") for n in nodes):
            constants = tuple(id(graph.constants[str(n.target)]) for n in nodes if n.target in graph.constants)
            found[name] = structural_hash(graph, "", tuple(nodes), []), constants
    return found


def _facts(graph: OpGraph, trail: Trail, repeated: Set[str] = frozenset(), terms: Iterable[LossTerm] = ()) -> RowFacts:
    """The facts that a trail tells. `terms`: those of another graph of the model."""
    found, updates = list[Coupling](), list[Coupling]()
    for node, met in trail.met.items():
        for kind, operator in met:
            if kind is Kind.BATCH_NORM or node in trail.reaching:
                found.append(_coupling(node, kind, operator))
    for node in graph.nodes:
        if not any(kind is Kind.BATCH_NORM for kind, _ in trail.met.get(node, ())):
            for name in node.meta.get("updates_buffers", ()):
                (updates if name in repeated else found).append(_coupling(node, Kind.BUFFER, name))
    scale = trail.loss.scale
    if scale.unsure or (isinstance(trail.loss, Mixed) and not found):
        source = str(graph.outputs["loss"].meta["source"])
        found.append(Coupling(kind=Kind.ROW_COUNT if scale.unsure else Kind.UNKNOWN, operator="loss", source=source))
    known = {coupling.source for coupling in found}
    for term in (*graph.loss.terms, *terms):
        if term.kind == "uncounted" and term.source not in known:
            found.append(Coupling(kind=Kind.COUNT, operator=term.counts, source=term.source))
    is_scaled = not scale.unsure and not graph.loss.rules.by_user  # the user's own rule weighs what there is
    power = scale.power if is_scaled else 0
    return RowFacts(couplings=tuple(dict.fromkeys(found)), power=power, updates=tuple(dict.fromkeys(updates)))


def _coupling(node: fx.Node, kind: Kind, operator: str) -> Coupling:
    path, cls = node.meta["module_path"], node.meta["module_type"]
    if kind not in (Kind.UNKNOWN, Kind.NO_RECORD, Kind.BUFFER):  # as the user calls it
        operator = cls if node.op == "call_module" else function_name(node.target, str(node.target))
    return Coupling(
        kind=kind, operator=operator, module=f"{path} ({cls})" if path else cls, source=str(node.meta["source"])
    )
