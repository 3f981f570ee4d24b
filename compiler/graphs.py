"""The op graphs that a plan is made of: those of one micro-batch, of any number of them and of any sizes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..graph.follow.coupling import find_facts, scaled_loss
from ..graph.follow.filled import check_filled
from ..graph.follow.rows import MEAN_OVER_ROWS, RowFacts, goes_on
from ..graph.opgraph import OpGraph
from ..graph.sizes.named import substitute_sizes
from ..ir.errors import CaptureError
from ..ir.program import Sizes
from .batches.dynamic_shapes import ROWS, dynamic_dims, fixed_dimension
from .batches.shape import micro_batch_spec
from .capture.dynamic import DynamicDims, SizeBranch
from .capture.prologue.prologue import Prologue
from .capture.rows.sizes import OtherTrace
from .loss import rewrite_loss, trace_loss
from .packing.borders import require_borders
from .planning import is_sharing, share
from .request import Request
from .stale import hide_marks

# What torch and a model's loss raise for sizes that they do not take; a trace of its own tells the user's line.
_REFUSALS = (OtherTrace, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError)


@dataclass
class Tape:
    """The tape of a model's first trace. `at_inputs`: the graph of inputs with other rows; None where there is none."""

    is_begun: bool = False
    at_inputs: Callable[[Any], OpGraph] | None = None


class Graphs:
    """Called with a number of micro-batches, it returns the op graph of one of them, and remembers it.

    The losses of the micro-batches average to that of the whole batch. All graphs come from one trace. A model that
    does something else for other rows, or that cannot be followed, is traced for each number.
    """

    def __init__(self, request: Request, accumulate: int | None = None, tape: Tape | None = None):
        self.request, self.accumulate = request, accumulate
        self.sizes: Sizes | None = None  # None: the most of each
        self._facts = MEAN_OVER_ROWS
        self._has_learned, self._learned_at = False, 1
        self._known: dict[int, OpGraph] = {}
        self._tape = tape or Tape()

    @staticmethod
    def find(request: Request, accumulate: int | None) -> Graphs:
        """The graphs of a request. Where plans share them, those of an earlier one with the same model and batch, or
        from its trace where the batch has other rows.
        `accumulate`: the micro-batches of a mini-batch with an update of its own; None: all of them have one update."""
        if request.loss_fn is not None or request.loss_weight is not None or request.prologue is not None:
            return Graphs(request, accumulate)
        batch, is_whole = request.batch, request.count == 1
        rows = tuple((name, shape[1:], dtype) for name, (shape, dtype) in batch.shape.leaves.items())
        model = id(request.model), tuple(batch.shape.flags.items()), request.types, request.device_kind
        more = request.gradient_dtype, request.boundary_dtype, is_whole, accumulate
        key = (Graphs, model, tuple(batch.shape.leaves.items()), batch.documents, repr(batch.sizes), more)
        return share(key, lambda: Graphs(request, accumulate, share((Tape, model, rows, batch.documents), Tape)))

    @property
    def prologue(self) -> Prologue | None:
        return self.request.prologue

    def __call__(self, count: int) -> OpGraph:
        if count not in self._known:
            self._known[count] = self._scale(self._capture(count), count)
        return self._known[count]

    def with_sizes(self, sizes: Sizes) -> Graphs:
        """Graphs of micro-batches of these sizes, from the same trace."""
        graphs = copy.copy(self)
        graphs.sizes, graphs._known = sizes, {}
        return graphs

    def anew(self, request: Request | None = None) -> Graphs:
        """Graphs of the model as it is now, with what is known of its rows. `request`: of another form of batches."""
        graphs = Graphs(request or self.request, self.accumulate)
        graphs._facts = self._facts
        return graphs

    def form_graphs(self, micro_batch: Mapping[str, Any], count: int) -> Graphs:
        """Graphs of batches of `count` micro-batches of this form. Raises what a trace does."""
        with hide_marks(self.request.model):
            return self.anew(self.request.form_request(micro_batch, count))

    def forget(self) -> None:
        """Forget all graphs, but not what was traced, unless other plans share them."""
        if not is_sharing():
            self._known.clear()

    def learn_rows(self, counts: list[int]) -> RowFacts:
        """Find out how the loss depends on the rows of a batch, and scale the loss accordingly from now on.

        counts: the numbers of micro-batches that may be planned, the likeliest first.
        """
        if not self._has_learned:
            facts = find_facts(self, counts, self.request.batch.shape.size, self.request.device_kind)
            self._learned_at = counts[0] if counts[0] in self._known else 1
            self._facts = facts if self.accumulate is None else facts.with_each_update()  # several updates mix them
            for count, graph in self._known.items():
                self._scale(graph, count)
            self._has_learned = True
        return self._facts

    def facts_at(self, count: int) -> RowFacts:
        """The facts of a plan of `count` micro-batches: those of the first number, unless forward does something else
        at this one."""
        size = self.request.batch.shape.size
        parts = {size // each: self(each) for each in (self._learned_at, count)}
        if count == 1 or len(parts) == 1 or goes_on(parts, size, self(1)):
            return self._facts
        unscaled = copy.copy(self)
        unscaled._facts = MEAN_OVER_ROWS
        if self._facts.power:
            unscaled._known = {}
        return find_facts(unscaled, [count], size, self.request.device_kind)

    def factor(self, count: int) -> float:
        """The factor of the loss in the graph of one of `count` micro-batches."""
        return self._facts.factor(self.accumulate or count)

    def _scale(self, graph: OpGraph, count: int) -> OpGraph:
        return scaled_loss(graph, self._facts, self.accumulate or count)

    def _capture(self, count: int) -> OpGraph:
        request = self.request
        is_alone = request.prologue is not None and request.prologue.apart  # rows of other micro-batches never meet it
        is_whole = is_alone or (request.batch.shape.size == 1 and not self.accumulate)
        with hide_marks(request.model):
            graph = rewrite_loss(self._graph(count), request.loss_weight is not None, is_whole)
        check_filled(graph, self.accumulate or count)  # once: `_scale` comes again with the facts
        if request.batch.documents:
            require_borders(graph)
        graph.packed = request.batch.documents
        graph.sum_dtype = request.types.sum_dtype(count, request.gradient_dtype)
        graph.boundary_dtype = request.types.boundary_dtype(request.boundary_dtype)
        return graph

    def _graph(self, count: int) -> OpGraph:
        """The graph as the model makes it, by the way that the request allows."""
        if self.request.batch.sizes is not None:
            return self._graph_of_sizes(count)
        is_cut = self.request.count != 1 or self._tape.at_inputs is not None
        if is_cut and self.request.prologue is None and self.request.batch.shape.size > 1:
            return self._graph_of_rows(count)
        return self._trace(count)

    def _trace(self, count: int, dims: DynamicDims | None = None, any_rows: bool = False) -> OpGraph:
        request, prologue = self.request, self.request.prologue
        inputs, by_user = micro_batch_spec(request.batch.inputs, count), request.loss_weight is not None
        lent = {} if prologue is None else prologue.trace_options(count)
        return trace_loss(
            request.model, inputs, request.loss_fn, by_user, request.types, request.device_kind,
            dynamic=dims, any_rows=any_rows, **lent,
        )  # fmt: skip

    def _graph_of_rows(self, count: int) -> OpGraph:
        """The graph from the tape of the first trace, which this makes if there is none."""
        tape = self._tape
        if not tape.is_begun:
            tape.is_begun = True
            try:
                graph = self._trace(count, any_rows=True)
            except CaptureError:  # of the model itself, or of what is followed: a trace alone tells
                return self._trace(count)
            tape.at_inputs, graph.at_inputs = graph.at_inputs, None
            return graph
        if tape.at_inputs is None:
            return self._trace(count)
        try:
            return tape.at_inputs(micro_batch_spec(self.request.batch.inputs, count))
        except _REFUSALS:
            return self._trace(count)

    def _graph_of_sizes(self, count: int) -> OpGraph:
        """The graph of the largest micro-batch, or of one with `sizes`."""
        sizes, shape = self.request.batch.sizes, self.request.batch.shape
        assert sizes is not None
        graph = self._whole
        if graph is None:
            dims = dynamic_dims(sizes, shape)
            graph = self._trace(
                count, DynamicDims(dims.ranges, {name: (None, *own[1:]) for name, own in dims.dims.items()})
            )
        most = {name: of.most for name, of in sizes.ranges.items()} | {sizes.rows or ROWS: shape.size // count}
        most |= self.sizes or {}
        return substitute_sizes(
            graph,
            {name: size for name, size in most.items() if name in graph.symbols},
            {name: of for name, of in sizes.micro_batch(count).items() if name in graph.symbols},
        )

    @cached_property
    def _whole(self) -> OpGraph | None:
        """The graph of the whole batch with symbolic sizes; None where the model does something else for other rows."""
        sizes, shape = self.request.batch.sizes, self.request.batch.shape
        assert sizes is not None
        try:
            return self._trace(1, dynamic_dims(sizes, shape))
        except SizeBranch as branch:
            if branch.size != ROWS or sizes.rows:
                raise
            return None
        except CaptureError as error:
            fixed = fixed_dimension(sizes, shape)
            if not fixed:
                raise
            raise CaptureError(f"{error}\n  {fixed}") from error.__cause__
