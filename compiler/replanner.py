"""Plans a job again, from the graphs that it was planned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import fx

from ..codegen.imports import Imports
from ..graph.loss_terms import CountRules
from ..graph.opgraph import OpGraph
from ..graph.tables.picked_rows import PickRules, picked_rows
from ..ir.errors import PassError
from ..ir.machine.hardware import Hardware
from ..ir.program import Program, Sizes, StageSpec, why_unlike
from .capture.prologue.prologue import Prologue
from .folder import Printed, print_all, print_counts
from .plan import Plan
from .planning import planning
from .search.attempts import Wishes
from .search.compiled import CompiledCandidate
from .search.offer import Offer, find_offer
from .search.search import search
from .search.what_helps import Help, what_helps


@dataclasses.dataclass(frozen=True)
class PrintedForm:
    """A form of micro-batches: its prologue, and the text of the plan and of what is counted for it."""

    prologue: Prologue
    printed: Printed
    counts: str


class AnyGraphs(Protocol):
    """The op graphs of micro-batches: `Graphs`."""

    @property
    def prologue(self) -> Prologue | None: ...

    def __call__(self, count: int) -> OpGraph: ...

    def with_sizes(self, sizes: Sizes) -> AnyGraphs: ...

    def anew(self) -> AnyGraphs: ...

    def form_graphs(self, micro_batch: Mapping[str, Any], count: int) -> AnyGraphs: ...

    def forget(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Replanner:
    """Plans again what has a plan: for other machines, for devices that turned out slow, for other sizes of a batch.

    `wishes`: those that the search began with.
    """

    graphs: AnyGraphs
    machine: Hardware
    wishes: Wishes
    plan: Plan
    programs: Sequence[Program]
    loss_fn: Callable[..., Any] | None = None
    prologue: Prologue | None = None

    def helps(self) -> list[Help]:
        """Try the plan's relatives on machines with more of one thing."""
        with self._planning():
            return what_helps(self.graphs, self.machine, self.wishes, self.plan)

    def offer(self, times: Mapping[int, float]) -> Offer | None:
        """A faster plan for devices that are slower than planned by these factors; None where none is worth it."""
        with self._planning():
            return find_offer(self.graphs, self.machine, self.wishes, self.plan, self.programs, times)

    def stages_at(self, sizes: Sizes) -> Mapping[str, StageSpec]:
        """The stages of the plan in micro-batches of these sizes."""
        return self._search(self.graphs.with_sizes(sizes)).draft.programs[0].interface.stages

    def print_anew(self) -> Printed:
        """The text of the plan for the model as it is now, traced again. Raises what `compile` does."""
        best = self._search(self.graphs.anew())
        return print_all(best.draft, best.evaluation, self.plan)

    def print_form(self, micro_batch: Mapping[str, Any], rules: tuple[CountRules, PickRules]) -> PrintedForm:
        """The plan's text for micro-batches of another form, of which this is one. `rules`: what the programs count
        and check. Raises what `compile` does, and `PassError` where the plan's programs cannot run them."""
        count = self.programs[0].interface.total_micro_batches
        graphs = self.graphs.form_graphs(micro_batch, count)
        decisions = self.plan.decisions.model_copy(update={"blocks": None})  # of other numbers of nodes
        best = self._search(graphs, self.plan.model_copy(update={"decisions": decisions}))
        loss, (picks, bounds) = best.draft.graph.loss, picked_rows(graphs(count))
        unlike = why_unlike(self.programs[0].interface, best.draft.programs[0].interface)
        if not unlike and (loss.rules, bounds) != rules:
            unlike = "the loss counts other targets, or takes other numbers as classes and tokens"
        steps = [[_op_text(node) for p in each for node in p.ops()] for each in (self.programs, best.draft.programs)]
        if unlike or steps[0] != steps[1]:
            raise PassError(unlike or "a step moves other values")
        assert graphs.prologue is not None
        printed, counts = print_all(best.draft, best.evaluation, self.plan), print_counts(loss, picks, Imports())
        graphs.forget()
        return PrintedForm(graphs.prologue, printed, counts)

    def _search(self, graphs: AnyGraphs, plan: Plan | None = None) -> CompiledCandidate:
        decided, options = plan or self.plan, dataclasses.replace(self.wishes.options, profiler=None)
        wishes = dataclasses.replace(
            self.wishes, options=options, decided=decided, micro_batches=decided.micro_batches, dump=None
        )
        with planning():
            return search(graphs, self.machine, wishes).best

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """As `planning`; graphs are large, and are forgotten afterwards."""
        with planning():
            yield
        self.graphs.forget()


def _op_text(node: fx.Node) -> tuple[Any, ...]:
    """The device, op and micro-batch, without the names of its values."""
    fields = node.kwargs
    return node.target, *(fields.get(name) for name in ("micro_batch", "src", "dst", "group", "keep"))
