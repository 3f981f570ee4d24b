"""`partition-mip`: the contiguous stages whose predicted step is fastest and, with `prove`, their gap to the optimum.

In: blocks with costs. Out: `draft.partition`, `draft.planned_for` and `draft.stages`; a note on the draft says what is
proven. Mobius 3.2 decides per layer i and stage j a boolean B_ij by a mixed-integer program (eq. 3 to 11). Given a
partition, though, the best schedule is a longest path (`recurrence`: the paper's own objective, and one that counts
what the machine adds: shared root complexes, first uploads, gradients, the optimizer). So partitions are searched
(`local_search`, most of them by bounds of many at once), all of them where there are few blocks. `proof/` bounds them
from below, which may find a faster partition. It is imported with `prove=true` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ...graph.opgraph import OpGraph
from ...ir.errors import PassError
from ...ir.units import format_seconds
from ..draft import Draft
from ..mapping.map_cross import cross_order
from ..partition.partition import Partition, StagesDecision, asked_stages, contiguous, device_order
from ..partition.slices import Slices
from .local_search import Cuts, Proof, Search
from .problem import MipProblem, problem_of
from .recurrence import contended_s, literal_s, residents

EXHAUSTIVE_BLOCKS = 12  # up to this number of blocks, every partition is tried
ONE_NUMBER_S = 1.0  # the deadline where the search asks for another number of stages
SEARCH_SHARE = 0.35  # the most that the local search may take of the deadline; the rest is for the proof
MOVES = 1.35  # what a search takes over its counted work: making moves, and which stages run again, are not counted


@dataclass(frozen=True)
class PartitionChoice:
    """A partition worth simulating, and the step that is predicted for it."""

    seconds: float
    cuts: Cuts
    decision: StagesDecision


@dataclass(frozen=True)
class PartitionMip(Partition):
    """`stages`: the number of stages; 0 leaves it to the search. `literal`: the paper's own objective and constraints.
    `deadline_s`: seconds of work (`passes/work_limit.py`) for search and proof together. `order`: the devices of the
    first stages, such as "1 0"; without it, neighbours are under different root complexes. `swap`: for
    `insert-fetch{swap=true}`, weights come from DRAM also where they could stay. `always`: for
    `insert-remat{always=true}`, every stage runs its forward again. `turns`: for `take-turns`, fetches do not share a
    root complex evenly. `prove`: also bound the optimum from below."""

    name: ClassVar[str] = "partition-mip"
    rank: ClassVar[int] = 33
    stages: int = 0
    literal: bool = False
    deadline_s: float = 6.0
    order: str = ""
    swap: bool = False
    always: bool = False
    turns: bool = False
    prove: bool = False

    def with_stages(self, number: int) -> Partition:
        return replace(self, stages=number, deadline_s=ONE_NUMBER_S)

    def cut(self, draft: Draft) -> StagesDecision:
        """Raises `DoesNotFit` where no contiguous stages fit, `PassError` for more stages than blocks or no time,
        `PlanError` for a block whose time is no positive number."""
        found = MipFound.find(draft, self)
        draft.notes[self.name] = found.remark()
        return contiguous(draft, found.best_cuts, found.order)


def candidates(draft: Draft, options: PartitionMip | None = None, most: int = 5) -> list[PartitionChoice]:
    """The best partitions into different numbers of stages, fastest first, then those with the fewest and the most
    stages that fit, for a simulation to judge. Raises as `PartitionMip.plan` does."""
    found = MipFound.find(draft, options or PartitionMip())
    by_count = found.search.best
    order = sorted(by_count, key=lambda count: by_count[count])
    wanted = list(dict.fromkeys([*order[:most], min(by_count), max(by_count)]))
    return [
        PartitionChoice(by_count[n][0], by_count[n][1], contiguous(draft, by_count[n][1], found.order)) for n in wanted
    ]


def _searches(graph: OpGraph) -> list[MipFound]:
    """The searches over the blocks of a graph so far: `candidates` asks for what `cut` has found."""
    return []


@dataclass
class MipFound:
    """The partitions that the search found. `proof`: of the best one; None: not proved."""

    problem: MipProblem
    search: Search
    counts: list[int]
    proof: Proof | None
    order: list[int]
    literal: bool

    @staticmethod
    def find(draft: Draft, options: PartitionMip) -> MipFound:
        if not options.deadline_s > 0:
            raise PassError(f"deadline_s={options.deadline_s}; it is a positive number of seconds")
        length, devices = len(draft.blocks), draft.lane_hardware.num_devices
        asked = asked_stages(draft, options.stages)
        order = device_order(options.order, devices) if options.order else cross_order(draft.lane_hardware, length)
        slices = Slices(draft, order)
        fewest = slices.fewest()
        counts = [asked] if asked else list(range(fewest or 1, length + 1))
        if fewest is None:
            raise slices.does_not_fit(counts)
        problem = replace(
            problem_of(draft, slices),
            swap=options.swap,
            always=options.always,
            ordered=options.turns,
        )
        known = [] if options.prove else draft.graph.once(_searches)
        for found in known:
            if found.answers(problem, counts, order, options):
                return found
        search = Search(
            problem,
            literal_s if options.literal else contended_s,
            SEARCH_SHARE * options.deadline_s,
        )
        every = length <= EXHAUSTIVE_BLOCKS
        if (search.run_all(counts) if every else search.run(counts)) is None:
            raise slices.does_not_fit(counts)
        proof = None
        if every and not search.is_late():
            proof = Proof(search.best_s, "trying every partition")
        elif options.prove:
            from .proof.solve import prove

            left_s = options.deadline_s - MOVES * min(search.work.seconds, SEARCH_SHARE * options.deadline_s)
            proof = prove(search, counts, left_s, options.literal)
        known.append(MipFound(problem, search, counts, proof, order, options.literal))
        return known[-1]

    def answers(
        self, problem: MipProblem, counts: Sequence[int], order: Sequence[int], options: PartitionMip
    ) -> bool:
        """Whether a search for these numbers of stages, with these options, would find no more."""
        is_long, is_same = self.search.most_s >= SEARCH_SHARE * options.deadline_s, self.literal == options.literal
        return is_long and is_same and (self.counts, self.order, self.problem) == (counts, order, problem)

    @property
    def best_s(self) -> float:
        return self.search.best_s

    @property
    def best_cuts(self) -> Cuts:
        return min(self.search.best.values())[1]

    @property
    def residents(self) -> tuple[bool, ...]:
        """Per device that has a stage, whether it is resident."""
        return residents(self.problem, self.best_cuts)

    def remark(self) -> str:
        """The objective in one sentence or two; lower bound, gap and how it was proven where it was."""
        objective = "the paper's own objective" if self.literal else "the objective with contention"
        text = f"{objective} is {format_seconds(self.best_s)} in {len(self.best_cuts) - 1} stages"
        if self.proof is None:
            how = f"penstock plan --prove, or {PartitionMip.name}{{prove=true}}"
            return f"{text}; its gap to the optimum is not proved: {how}"
        gap = 1 - self.proof.lower_s / self.best_s
        text += f", at least {format_seconds(self.proof.lower_s)} (gap {max(0.0, gap):.2%}) by {self.proof.how}"
        return text + (f"; {self.proof.trouble}" if self.proof.trouble else "")
