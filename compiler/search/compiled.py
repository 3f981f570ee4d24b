"""One candidate: cheap up to its lower bound, then compiled and simulated, and proven only if it is chosen.

Candidates with the same number of micro-batches share blocks, partitions and stages through a `CandidateCompiler`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...graph.opgraph import OpGraph
from ...ir.errors import DoesNotFit, PassError, PenstockError, PlanError, VerifyError
from ...ir.machine.hardware import Hardware
from ...ir.program import WRITTEN_OUT, Program, reserve_communicators
from ...ir.units import format_bytes
from ...ir.verify import verify
from ...passes.base import Pass, check_contracts
from ...passes.draft import Draft, Options
from ...passes.mapping.mapping import Mapping
from ...passes.memory.choose_activations import ChooseActivations
from ...passes.memory.insert_fetch import InsertFetch
from ...passes.memory.insert_remat import InsertRemat
from ...passes.memory.insert_ssd import InsertSsd
from ...passes.memory.keep_stages import KeepStages
from ...passes.memory.take_turns import TakeTurns, sharing
from ...passes.optimizer.insert_optimizer import InsertOptimizer
from ...passes.optimizer.overlap_optimizer import OverlapOptimizer
from ...passes.partition.layer_parts import layer_apart
from ...passes.partition.partition import Partition
from ...passes.partition_mip.partition_mip import PartitionMip
from ...passes.receive_earlier import receive_earlier
from ...passes.rewrite.coarsen import Coarsen
from ...passes.rewrite.graph_pass import GraphPass
from ...passes.rewrite.rewriter import Rewriter
from ...passes.rewrite.split_context import SplitContext
from ...passes.rewrite.split_width import SplitWidth
from ...passes.schedule.evaluation import evaluation_programs
from ...passes.schedule.schedule import Schedule
from ...passes.sharding.mesh import Mesh
from ...passes.work_limit import WorkDone
from ...runtime.simulate import Timeline
from ..pipeline import PassRecord, require_complete, run_passes
from ..steps import simulate_here, step_seconds_here
from .bounds import Bound, lower_bound
from .candidate import Candidate
from .fit import check_fit, check_lasting
from .host_memory import evaluation_lacks

DumpPrograms = Callable[[str, Draft], None]
PassRun = tuple[dict[str, Any], list[PassRecord]]  # decisions and records


@dataclass
class CompiledCandidate:
    """A candidate with its programs."""

    candidate: Candidate
    draft: Draft
    decisions: dict[str, Any]
    records: list[PassRecord]
    step_s: float
    evaluation: list[Program] = field(default_factory=list)
    no_evaluation: str | None = None  # why there are no evaluation programs

    @cached_property
    def timeline(self) -> Timeline:
        draft = self.draft
        return simulate_here(draft.programs, draft.machine, draft.options.precision)

    @property
    def burden(self) -> tuple[float, float, int]:
        """Bytes written to SSDs, bytes moved, and instructions: of plans that take the same time the lighter wins."""
        moved = self.timeline.moved_bytes
        disks = [f"ssd{host}.write" for host in range(len(self.draft.machine.hosts))]
        return sum(moved.get(disk, 0) for disk in disks), sum(moved.values()), _num_ops(self.draft)

    @property
    def count(self) -> int:
        """Micro-batches of all lanes together."""
        return self.draft.programs[0].interface.total_micro_batches

    @property
    def name(self) -> str:
        return self.candidate.title(self.count)


@dataclass
class PlacedCandidate:
    """A candidate whose stages have their devices; `todo` are the passes that make its programs."""

    candidate: Candidate
    draft: Draft
    todo: tuple[Pass, ...]
    decisions: dict[str, Any]
    records: list[PassRecord]

    @property
    def keys(self) -> list[tuple[str, tuple[str, tuple[Pass, ...]]]]:
        """Keys that candidates with the same programs have in common. Beside each key is the field of a trial that must
        be true, or else the key says nothing; empty for the first, which always counts. Passes over the op graph may
        do nothing."""
        fields = [name for p in self.candidate.graph_passes for name in p.fields()]
        names = [name for name in fields if self.decisions.get(name)]
        shown = {name: self.decisions.get(name) for name in (*names, "blocks", "mesh", "stages", "devices", "copies")}
        placed, todo = json.dumps(shown, default=str), self.todo
        if self.tier is None and not self.draft.options.needs_norm:  # no step waits
            todo = tuple(OverlapOptimizer() if isinstance(p, InsertOptimizer) else p for p in todo)
        found = [("", (placed, todo))]
        found.append(("alone_on_links", (placed, tuple(p for p in todo if not isinstance(p, TakeTurns)))))
        forced = [p for p in todo if getattr(p, "swap", False) or getattr(p, "always", False)]
        if not forced and not self.candidate.is_shared:
            found.append(("keeps_all", (placed, tuple(filter(None, map(_plain_form, todo))))))
        return found

    @property
    def cut(self) -> str:
        """Equal for candidates with the same stages of the same lanes."""
        return json.dumps([self.decisions.get(name) for name in ("blocks", "mesh", "stages")], default=str)

    def bound(self) -> Bound:
        """A lower bound of the simulated step."""
        swap = any(p.swap for p in self.todo if isinstance(p, InsertRemat | ChooseActivations | InsertFetch))
        split = any(p.splits_backward for p in self.todo if isinstance(p, Schedule))
        candidate = self.candidate
        return lower_bound(
            self.draft, swap, self.tier, split, candidate.is_synchronous, candidate.marks, candidate.keeps_stages
        )

    @property
    def tier(self) -> str | None:
        """The option of `insert-ssd` that names what goes to SSD; None without that pass."""
        ssd = self.candidate.find(InsertSsd)
        return None if ssd is None else ssd.tier


@dataclass(frozen=True)
class Prefix:
    """The draft after passes that several candidates begin with, its decisions and records."""

    draft: Draft
    decisions: dict[str, Any]
    records: list[PassRecord]


# Seconds of work: for a node of the graph and a block in a pass that candidates share; in local searches of a
# partitioner, for a block; for an op of a program that is made, and for one that is simulated, thrice where turns on
# links are weighed.
NODE_S, BLOCK_S, SEARCHED_BLOCK_S, MADE_S, SIMULATED_S = 6e-5, 1e-3, 8e-3, 5e-4, 2.5e-4
DIVIDED_NODE_S = 8e-4  # for a node, where the work of a graph is divided among members


class CandidateCompiler:
    """Compiles candidates with one number of micro-batches. `decided`: decisions to apply instead of planning; `dump`:
    see `run_passes`; `work`: where the work that is done is counted."""

    def __init__(
        self,
        graph: OpGraph,
        hardware: Hardware,
        options: Options,
        decided: MappingType[str, Any] | None = None,
        dump: DumpPrograms | None = None,
        work: WorkDone | None = None,
    ):
        self.work = work or WorkDone()
        self.graph, self.hardware, self.options = graph, hardware, options
        self.decided, self.dump = decided, dump
        self._known: dict[tuple[Pass, ...], Prefix | PenstockError] = {}
        self._with_less: dict[tuple[int, ...], CandidateCompiler] = {}  # by the budgets of the devices
        self._rewriter = Rewriter(hardware)

    def lane(self, candidate: Candidate) -> Draft:
        """The model as layers, after the candidate's passes over the op graph, with a lane's part of the machine.

        Raises `PassError` where lanes cannot be made.
        """
        candidate = candidate.add_wishes(self.options)
        return self._prefix(tuple(p for p in candidate.passes if isinstance(p, GraphPass | Coarsen | Mesh))).draft

    def place(self, candidate: Candidate) -> PlacedCandidate:
        """Run a candidate's passes up to its mapping. Raises `DoesNotFit` and `PassError` as the passes do."""
        passes = candidate.passes
        check_contracts(passes)
        require_complete(passes)
        shared = tuple(itertools.takewhile(lambda p: isinstance(p, GraphPass | Coarsen | Mesh | Partition), passes))
        mapped = tuple(itertools.takewhile(lambda p: isinstance(p, Mapping), passes[len(shared) :]))
        prefix = self._prefix(shared)
        draft = _copy(prefix.draft)
        made, took = self._run(draft, mapped)
        todo = passes[len(shared) + len(mapped) :]
        placed = PlacedCandidate(candidate, draft, todo, {**prefix.decisions, **made}, [*prefix.records, *took])
        if placed.tier is None:
            check_lasting(draft, candidate.marks, candidate.keeps_stages)
        return placed

    def _prefix(self, passes: tuple[Pass, ...]) -> Prefix:
        """The draft after these passes, which run once for all candidates that begin with them."""
        if not passes:
            return Prefix(Draft(self.graph, self.hardware, self.options), {}, [])
        if passes not in self._known:
            try:
                before = self._prefix(passes[:-1])
                draft = _copy(before.draft)
                block_s = SEARCHED_BLOCK_S if isinstance(passes[-1], PartitionMip) else BLOCK_S
                node_s = DIVIDED_NODE_S if isinstance(passes[-1], SplitContext | SplitWidth) else NODE_S
                self.work.add(node_s * len(draft.graph.nodes) + block_s * len(draft.blocks))
                made, took = self._run(draft, passes[-1:])
                self._known[passes] = Prefix(draft, {**before.decisions, **made}, [*before.records, *took])
            except (DoesNotFit, PassError, PlanError) as error:
                self._known[passes] = error.with_traceback(None)
        found = self._known[passes]
        if isinstance(found, PenstockError):
            raise found
        return found

    def finish(self, placed: PlacedCandidate) -> CompiledCandidate:
        """Make and simulate the programs, still unproven. Raises `DoesNotFit` where a memory is too small.

        How many communicators a GPU has is known when there are programs. Those that leave no room for them are made
        once more, for a machine that has them in its reserve.
        """
        try:
            return self._finish(placed)
        except DoesNotFit:
            machine = placed.draft.machine
            budgets = tuple(device.budget_bytes for device in machine.devices)
            if budgets == tuple(device.budget_bytes for device in self.hardware.devices):
                raise
        if budgets not in self._with_less:
            self._with_less[budgets] = CandidateCompiler(
                self.graph, machine, self.options, self.decided, self.dump, self.work
            )
        tighter = self._with_less[budgets]
        return tighter._finish(tighter.place(placed.candidate))

    def _finish(self, placed: PlacedCandidate) -> CompiledCandidate:
        draft = placed.draft
        try:
            decisions, records = self._run(draft, placed.todo)
        finally:
            self.work.add(MADE_S * _num_ops(draft))
        draft.use_machine(reserve_communicators(draft.programs, draft.machine))
        check_fit(draft)
        in_turns = placed.candidate.find(TakeTurns) is not None and sharing(draft.programs, draft.lane_hardware)
        self.work.add(SIMULATED_S * _num_ops(draft) * _num_simulated_lanes(draft) * (1 + 2 * bool(in_turns)))
        try:
            step_s = _step_s(draft)
        except VerifyError as error:
            step_s = self._reorder_receives(placed, error)
        decisions, records = {**placed.decisions, **decisions}, [*placed.records, *records]
        return CompiledCandidate(placed.candidate, draft, decisions, records, step_s)

    def _reorder_receives(self, placed: PlacedCandidate, error: VerifyError) -> float:
        """Let receives come earlier, where that ends the waiting for ever. Raises `DoesNotFit` where it does not."""
        draft = placed.draft
        other = receive_earlier(draft.programs, draft.lane_hardware)
        if other is None:
            raise _waits_for_ever(draft, error) from error
        draft.programs = other
        for schedule in (p for p in placed.todo if isinstance(p, Schedule)):
            draft.notes[schedule.name] = "some receives come earlier, or devices would wait for each other for ever"
        if self.dump is not None:
            self.dump("receive-earlier", draft)
        try:
            return _step_s(draft)
        except VerifyError as again:
            raise _waits_for_ever(draft, again) from again

    def _run(self, draft: Draft, passes: Sequence[Pass]) -> PassRun:
        record, rewrite = self.dump is not None, self._rewriter
        return run_passes(draft, passes, self.decided, dump=self.dump, record=record, check=False, rewrite=rewrite)


def _plain_form(p: Pass) -> Pass | None:
    """The plainest pass that does the same where devices hold all weights, states and saved tensors; None: no pass."""
    match p:
        case TakeTurns() | KeepStages() | InsertSsd():
            return None
        case ChooseActivations():
            return InsertRemat()
        case OverlapOptimizer():
            return InsertOptimizer()
    return p


def _num_ops(draft: Draft) -> int:
    return sum(sum(1 for _ in program.ops()) for program in draft.programs)


def _num_simulated_lanes(draft: Draft) -> int:
    """The number of lanes whose programs are simulated."""
    lanes = draft.programs[0].interface.lanes
    return len(lanes) if lanes and draft.machine.num_devices <= WRITTEN_OUT else 1


def _step_s(draft: Draft) -> float:
    return step_seconds_here(draft.programs, draft.machine, draft.options.precision)


def _copy(draft: Draft) -> Draft:
    """A copy of a draft without programs, which later passes may change."""
    assert not draft.programs
    return dataclasses.replace(draft, notes=dict(draft.notes))


def prove(compiled: CompiledCandidate) -> CompiledCandidate:
    """Verify the programs and add those of evaluation. Raises `DoesNotFit` where memories are too tight to run."""
    draft = compiled.draft
    verify(draft.programs, draft.lane_hardware, memory=False)
    try:
        verify(draft.programs, draft.lane_hardware)
    except VerifyError as error:
        raise _waits_for_ever(draft, error) from error
    compiled.evaluation, compiled.no_evaluation = [], draft.graph.eval_error
    if compiled.no_evaluation is None:
        evaluation = evaluation_programs(draft, compiled.decisions["fetch"])
        missing = evaluation_lacks(draft.programs, evaluation, draft.lane_hardware)
        if missing:
            compiled.no_evaluation = f"its results lack {format_bytes(missing)} of DRAM beside what training takes"
        else:
            compiled.evaluation = evaluation
    return compiled


def _waits_for_ever(draft: Draft, error: VerifyError) -> DoesNotFit:
    apart = layer_apart(draft)
    parts = (
        f"the parts of {apart} are on several devices, which keep rows for each other; partition-balanced"
        "{together=true} puts all parts of a layer on one of equal devices, which may fit. "
    )
    text = "memories are so tight that devices would wait for each other for ever: "
    return DoesNotFit(f"{text}{parts if apart else ''}{error}")
