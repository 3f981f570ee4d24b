"""Counted terms: a mean over what is counted becomes a sum, divided by what the whole batch counts.

In: an op graph of one micro-batch. Out: the same graph, in which each term of the loss that divides by a count of its
own rows (the targets that a cross entropy does not ignore, the sum of a mask) divides by an input instead. Its mean
over the micro-batches is then the term of the whole batch.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ...ir.errors import CaptureError
from ..dataflow import Dataflow
from ..edit import GraphEdit, erase, erase_dead, put_input, replace_uses
from ..follow.linear import LinearPath, is_quotient, reduction_of
from ..loss_terms import NUM_ITEMS, CountRules, Divisor, LossRules, LossTerm
from ..opgraph import OpGraph, build_module
from .class_loss import ClassLoss, class_loss
from .counting import BatchView, Targets, Total, count_graph, divisor_graph, is_item_count

ITEMS = "items"
IGNORED = -100  # the label that transformers ignore
_LOW = (torch.float16, torch.bfloat16)


def count_terms(graph: OpGraph, is_whole: bool = False) -> OpGraph:
    """Rewrite the counted terms of `graph.outputs["loss"]` and note all terms in `graph.loss`.

    Terms that are plain means over rows stay as they are. is_whole: the graph is of a batch that is never cut.
    """
    rows = min(value.shape[0] for name, value in graph.inputs.items() if name != NUM_ITEMS)  # others have multiples
    view = BatchView.build(graph, None if is_whole else rows)
    path = LinearPath.to(graph, graph.outputs["loss"], view.depends)
    rewrite = _Rewrite(graph, view, path, idle={node for node in graph.nodes if not node.users})
    terms = [rewrite.term(node) for node in path.terms]
    graph.loss = rewrite.finish(terms)
    return graph


@dataclass
class _Rewrite:
    graph: OpGraph
    view: BatchView
    path: LinearPath
    totals: list[Total] = field(default_factory=list)
    divisors: list[tuple[Divisor, fx.Node | None, dict[fx.Node, int]]] = field(default_factory=list)
    idle: set[fx.Node] = field(default_factory=set)  # nodes that nothing has read before
    inputs: dict[tuple[Any, ...], fx.Node] = field(default_factory=dict)  # what is counted -> the item of its input

    def term(self, node: fx.Node) -> LossTerm:
        """Rewrite one term where it divides by a count; say what it is."""
        source = str(node.meta.get("source", ""))
        found = class_loss(self.graph, node)
        if found is not None and found.reduction == "mean":
            return self._class_term(node, found, source)
        if is_quotient(self.graph, node) and self.view.depends(node.args[1]):
            return self._quotient(node, source)
        return LossTerm(kind="mean", source=source)

    # --- a mean over targets

    def _class_term(self, node: fx.Node, found: ClassLoss, source: str) -> LossTerm:
        target = found.arguments["target"]
        if target.meta["val"].is_floating_point() or not self.view.depends(target):
            return LossTerm(kind="mean", source=source)  # of probabilities, or of targets that never change
        targets = Targets(target, found.arguments["ignore_index"], self._weight(node, found))
        of = "the number of" if targets.weight is None else "the sum of the class weights of"
        words = f"{of} targets other than {targets.ignored}"
        if not (self._is_countable(target) and self.view.is_known(targets.weight)):
            return LossTerm(kind="uncounted", source=source, counts=words)
        key = ("targets", target, targets.ignored, targets.weight)
        item = self._item(key, node, True, lambda: (None, {target: self._total(Total(targets))}))
        total = self._sum_loss(node, found, targets.weight)
        self._replace(node, self._divide(node, total, item))
        return LossTerm(kind="counted", source=source, counts=words, input=_input_of(item), of_targets=True)

    def _is_countable(self, target: fx.Node) -> bool:
        """Whether targets are classes that depend on the batch alone, row by row."""
        known = self.view.depends(target) and self.view.is_known(target)
        return known and not target.meta["val"].is_floating_point() and self.view.keeps_rows_apart(target)

    def _weight(self, node: fx.Node, found: ClassLoss) -> fx.Node | None:
        if not found.weight:
            given: fx.Node | None = found.arguments.get("weight")
            return given
        table = self.graph.module.get_submodule(str(node.target)).weight
        value = node.meta["val"].new_empty(table.shape, dtype=table.dtype)
        made = GraphEdit(self.graph, node).put("get_attr", found.weight, (), value)
        self.view.shared.add(made)
        return made

    def _sum_loss(self, node: fx.Node, found: ClassLoss, weight: fx.Node | None) -> fx.Node:
        """The sum in place of the mean. A sum in half precision could overflow: it is made in fp32 of single losses."""
        given = {**found.arguments, "weight": weight}
        low = node.meta["val"].dtype in _LOW
        defaults = inspect.signature(found.function).parameters
        extra = {
            name: value
            for name, value in given.items()
            if name not in ("input", "target", "reduction") and value != defaults[name].default
        }
        extra["reduction"] = "none" if low else "sum"
        made = self._add(node, found.function, (given["input"], given["target"]), extra, node.meta["val"].dtype)
        if not low:
            return made
        made.meta["val"] = fake_like(node.meta["val"], given["target"].meta["val"].shape, node.meta["val"].dtype)
        return self._add(node, torch.sum, (made,), {"dtype": torch.float32}, torch.float32)

    # --- a quotient of the user's own

    def _quotient(self, node: fx.Node, source: str) -> LossTerm:
        above, below = node.args[:2]
        kind = self._kind(above)
        reductions = self.view.totals(below) if isinstance(below, fx.Node) else None
        counts_items = any(map(is_item_count, reductions or ()))
        words = f"the number of targets ({NUM_ITEMS})" if counts_items else "the total of the denominator"
        if not kind or not reductions or not isinstance(above, fx.Node):
            return LossTerm(kind="uncounted", source=source, counts=words)
        key = ("divisor", below, kind)
        item = self._item(key, node, kind == "sum", lambda: (below, {r: self._reduction_total(r) for r in reductions}))
        terms = LinearPath.to(self.graph, above, self.view.depends).terms
        of_targets = all(class_loss(self.graph, term) is not None for term in terms)
        self._replace(node, self._divide(node, above, item))
        return LossTerm(kind="counted", source=source, counts=words, input=_input_of(item), of_targets=of_targets)

    def _kind(self, numerator: Any) -> str:
        """ "sum" or "mean" if the numerator is made of sums, or of means, over all rows; else ""."""
        if not isinstance(numerator, fx.Node):
            return ""
        kinds = {self._reduction(term) for term in LinearPath.to(self.graph, numerator, self.view.depends).terms}
        return kinds.pop() if len(kinds) == 1 else ""

    def _reduction(self, node: fx.Node) -> str:
        found = class_loss(self.graph, node)
        if found is not None:
            floating = found.arguments["target"].meta["val"].is_floating_point()
            return "sum" if found.reduction == "sum" else "mean" if found.reduction == "mean" and floating else ""
        return reduction_of(self.graph, node)

    def _reduction_total(self, node: fx.Node) -> int:
        if is_item_count(node):
            return self._item_total()
        return self._total(Total(node, is_mean=reduction_of(self.graph, node) == "mean"))

    # --- inputs and nodes

    def _total(self, total: Total) -> int:
        if total not in self.totals:
            self.totals.append(total)
        return self.totals.index(total)

    def _item(
        self, key: tuple[Any, ...], node: fx.Node, spread: bool, count: Callable[[], tuple[Any, dict[fx.Node, int]]]
    ) -> fx.Node:
        """The scalar of a new input that holds a divisor; equal divisors share one."""
        dtype = torch.float64 if node.meta["val"].dtype == torch.float64 else torch.float32
        key = (*key, spread, dtype)
        if key not in self.inputs:
            name = _free_name(ITEMS, self.graph.inputs)
            made, totals = count()
            self.divisors.append(
                (Divisor(input=name, dtype=str(dtype).removeprefix("torch."), spread=spread), made, totals)
            )
            self.inputs[key] = add_input(self.graph, name, dtype)
        return self.inputs[key]

    def _divide(self, node: fx.Node, total: fx.Node, item: fx.Node) -> fx.Node:
        dtype = torch.promote_types(total.meta["val"].dtype, item.meta["val"].dtype)
        made = self._add(node, operator.truediv, (total, item), {}, dtype)
        before = node.meta["val"].dtype
        if dtype != before:
            made = self._add(node, torch.Tensor.to, (made, before), {}, before)
        return made

    def _add(self, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: Any) -> fx.Node:
        """A node in front of `like`, with its shape and its place in the user's model."""
        call: tuple[str, Any] = ("call_method", "to") if target is torch.Tensor.to else ("call_function", target)
        value = like.meta["val"]
        return GraphEdit(self.graph, like).put(*call, args, fake_like(value, value.shape, dtype), kwargs)

    def _replace(self, node: fx.Node, made: fx.Node) -> None:
        """Let the loss's path and the results read the new node; whatever else reads the old one keeps it."""
        replace_uses(self.graph, {node: made}, self.path.inside)
        if not node.users:
            node.name, made.name = made.name, node.name  # the loss keeps its name in programs

    # --- the count that the model itself takes

    def _item_total(self) -> int:
        """The total that `num_items_in_batch` is: the targets of the cross entropy, or else the labels."""
        given = (self._targets_of(term) for term in self.path.terms)
        targets = next((found for found in given if found is not None), None)
        if targets is None:
            labels = next((n for n in self.graph.nodes if n.op == "placeholder" and n.target == "labels"), None)
            if labels is None:
                name = type(self.graph.model).__name__
                raise CaptureError(
                    f"{name}.forward takes {NUM_ITEMS}, but neither a cross entropy nor an input `labels` says what to "
                    "count: give loss_weight=, a function from a micro-batch's rows to what they count"
                )
            targets = Targets(labels, IGNORED)
        return self._total(Total(targets))

    def _targets_of(self, term: fx.Node) -> Targets | None:
        """The targets of a cross entropy that is a term, or a summand of a quotient's numerator."""
        waiting = [term]
        if is_quotient(self.graph, term) and isinstance(term.args[0], fx.Node):
            waiting = LinearPath.to(self.graph, term.args[0], self.view.depends).terms
        for node in waiting:
            found = class_loss(self.graph, node)
            target = found.arguments["target"] if found is not None else None
            if found is None or target is None or target.meta["val"].is_floating_point():
                continue
            if not self._is_countable(target):
                raise CaptureError(
                    f"{node.meta.get('source', '')}\n  forward takes {NUM_ITEMS}, and these targets cannot be counted "
                    "from a micro-batch's rows: give loss_weight=, a function from a micro-batch's rows to what they "
                    "count"
                )
            return Targets(target, found.arguments["ignore_index"])
        return None

    def _count_items(self) -> fx.Node | None:
        """Count what the model takes as `num_items_in_batch` if it still reads it, else return the input to drop."""
        given = next((n for n in self.graph.nodes if n.op == "placeholder" and n.target == NUM_ITEMS), None)
        if given is None or not self._is_read(given):
            return given
        (item,) = given.users
        divisor = Divisor(input=NUM_ITEMS, dtype="int64", spread=False)
        self.divisors.append((divisor, None, {item: self._item_total()}))
        return None

    def _is_read(self, wanted: fx.Node) -> bool:
        """Whether a result, or a node with an effect, still reads a node."""
        flow = Dataflow(self.graph.nodes)
        return any(user not in flow.dead() for user in wanted.users)

    def finish(self, terms: list[LossTerm]) -> LossRules:
        """Cut out what counts, and remove from the graph what nothing reads any more."""
        graph, counts, divisors = self.graph, None, None
        names: list[str] = []
        unread = self._count_items()
        if self.divisors:
            counted, names = count_graph(self.view, self.totals)
            made = divisor_graph(self.view, [row[1:] for row in self.divisors], self.totals)
            counts = build_module(graph.model, counted, graph.constants)
            divisors = None if made is None else build_module(graph.model, made, graph.constants)
        erase_dead(graph, self.idle.difference(unread.users if unread is not None else ()))
        if unread is not None:
            erase(graph, [unread])
            del graph.inputs[NUM_ITEMS]
        rules = CountRules(
            inputs=tuple(names),
            means=tuple(total.is_mean for total in self.totals),
            transforms=divisors is not None,
            divisors=tuple(divisor for divisor, _, _ in self.divisors),
            buffers=()
            if counts is None
            else tuple(
                (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                for name, tensor in counts.named_buffers()
            ),
        )
        return LossRules(terms=terms, rules=rules, counts=counts, divisors=divisors)


def _input_of(item: fx.Node) -> str:
    base = item.args[0]
    assert isinstance(base, fx.Node)
    return str(base.target)


def fake_like(value: torch.Tensor, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A fake tensor beside `value`, which gradients reach as they reach `value`."""
    return value.detach().new_empty(shape, dtype=dtype).requires_grad_(value.requires_grad)


def _free_name(stem: str, taken: Mapping[str, Any]) -> str:
    name, number = stem, 2
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    return name


def add_input(graph: OpGraph, name: str, dtype: torch.dtype) -> fx.Node:
    """A new input with one number per micro-batch; returns the node of that number."""
    fake = next(iter(graph.inputs.values())).new_empty((1,), dtype=dtype)
    graph.inputs[name] = fake
    given = put_input(graph, name, fake)
    return GraphEdit(graph, given, after=True).call(operator.getitem, given, 0, view_of=given)
