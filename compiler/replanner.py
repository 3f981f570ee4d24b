"""Plans a job again, from the graphs that it was planned from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ..graph.opgraph import OpGraph
from ..ir.machine.hardware import Hardware
from ..ir.program import Program, Sizes, StageSpec
from .capture.prologue.prologue import Prologue
from .folder import Printed, print_all
from .plan import Plan
from .planning import planning
from .search.attempts import Wishes
from .search.compiled import CompiledCandidate
from .search.offer import Offer, find_offer
from .search.search import search
from .search.what_helps import Help, what_helps


class AnyGraphs(Protocol):
    """The op graphs of micro-batches: `Graphs`."""

    def __call__(self, count: int) -> OpGraph: ...

    def with_sizes(self, sizes: Sizes) -> AnyGraphs: ...

    def anew(self) -> AnyGraphs: ...

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

    def _search(self, graphs: AnyGraphs) -> CompiledCandidate:
        options = dataclasses.replace(self.wishes.options, profiler=None)
        wishes = dataclasses.replace(self.wishes, options=options, decided=self.plan, dump=None)
        with planning():
            return search(graphs, self.machine, wishes).best

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """As `planning`; graphs are large, and are forgotten afterwards."""
        with planning():
            yield
        self.graphs.forget()
