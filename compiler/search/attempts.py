"""Candidates tried one by one: a `Trial` of each, and the best so far.

A candidate is not compiled if its lower bound is no better than the best, or if it comes to the same programs as
another. Candidates left when time is up, or nothing is left to gain, are listed as such; but each named strategy,
partitioner and mapping is judged once, by its bound or by its simulation, within `OWED` more of the time, unless the
search is shorter than usual. Time is counted by what was done (`passes/work_limit.py`), so that a search ends where it
would end on a machine that does nothing else.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...graph.opgraph import OpGraph
from ...ir import ops
from ...ir.errors import DoesNotFit, PassError, PlanError
from ...ir.machine.hardware import Hardware
from ...ir.program import Program
from ...ir.units import format_bytes, format_seconds
from ...passes.draft import Draft, Options
from ...passes.memory.take_turns import sharing
from ...passes.sharding.mesh import Mesh
from ...passes.work_limit import WorkDone
from ..plan import Plan, Rival
from ..strategies import STRATEGIES
from .bounds import machine_bound
from .candidate import PLAIN, Candidate
from .candidates import micro_batch_counts
from .compiled import CandidateCompiler, CompiledCandidate, DumpPrograms, prove
from .host_memory import tier_of
from .trial import Pruned, SamePlan, Skipped, Trial, errors_of, nearest_miss

Trace = Callable[[int], OpGraph]  # number of micro-batches -> op graph of one micro-batch
logger = logging.getLogger("penstock.compiler.search")  # of each plan that was tried
LARGE_GRAPH_NODES = 2000  # above this the sweep keeps to one number of micro-batches: each needs a graph of its own
SEARCH_S = 33.0  # of work
TRACE_S = 3e-4  # of work, for a node of a graph of another number of micro-batches
SAME = 1e-9  # the share by which the steps of equal plans may differ, by rounding
MOST_PLANS, MOST_WORK = 12, 0.6  # plans in a row without a gain, and times the work until the last one: the search ends
GAIN = 0.002  # the share of a step that counts as a gain
OWED = 0.5  # times the search's work, for what has not been judged when that is done
NEAR = 0.01  # the share of a step that is not worth another candidate


@dataclass
class Wishes:
    """The choices of the user; None leaves one to the search. `asked`: the strategy. `search_s`: seconds of
    work within which candidates are tried, once something fits. `lasting_bytes`: see `check_states_fit`.
    `fewest_first`: the first number of micro-batches that fits, from one on. `steps`: of the run. `require`: raises
    `PlanError` for programs that cannot keep another wish."""

    asked: Candidate | None
    micro_batches: int | None
    batch_size: int
    options: Options
    dump: DumpPrograms | None = None
    decided: Plan | None = None
    search_s: float = SEARCH_S
    lasting_bytes: int = 0  # between steps, each tensor once
    fewest_first: bool = False
    steps: int | None = None
    is_asked: bool = True  # by a user; else by a refusal, which looks for the nearest plan
    require: Callable[[Sequence[Program]], None] | None = None


@dataclass(frozen=True)
class Progress:
    """The progress of a search, which its logger tells after each plan: the plans tried, the step of the best of them,
    and a lower bound for the numbers of micro-batches tried. `is_asked`: as of `Wishes`."""

    num_tried: int
    best_s: float | None
    bound_s: float
    is_asked: bool = True

    def __str__(self) -> str:
        best = "none fits so far" if self.best_s is None else f"the best takes {format_seconds(self.best_s)}"
        return f"{self.num_tried} plan{'s' * (self.num_tried != 1)} tried, {best}"


@dataclass
class SearchResult:
    """The choice of the search, and its rivals."""

    best: CompiledCandidate
    rivals: list[Rival] = field(default_factory=list)


class Attempts:
    """The trials so far of what `wishes` leave open."""

    def __init__(self, trace: Trace, hardware: Hardware, wishes: Wishes):
        self.trace, self.hardware, self.wishes = trace, hardware, wishes
        self.best: CompiledCandidate | None = None
        self.trials: list[Trial] = []
        self.compilers: dict[int, CandidateCompiler] = {}  # by number of micro-batches
        self.seen: dict[tuple[int, Any], Trial] = {}  # (micro-batches, what decides the programs) -> its trial
        self.done: set[tuple[int, Candidate]] = set()
        self.judged: set[str] = set()  # the partitioners and mappings of what was simulated, or ruled out
        self.work = WorkDone()
        self.until_s = wishes.search_s
        self.patience = max(1.0, wishes.search_s / SEARCH_S)
        self.gained_s, self.plans = 0.0, 0  # the work that was done at the last gain, and the plans tried since then
        self.longest_s = 0.0  # of work for one candidate
        self.bounds_s: dict[int, float] = {}  # by number of micro-batches, what no plan undercuts
        self.has_ssds = any(host.ssds for host in hardware.hosts)
        self.usual, self.last_resort = micro_batch_counts(wishes.batch_size, hardware)
        if wishes.micro_batches is not None:
            self.usual, self.last_resort = [wishes.micro_batches], []
        elif wishes.fewest_first:
            self.usual, self.last_resort = [1], sorted({*self.usual, *self.last_resort} - {1})

    @property
    def reason_to_end(self) -> Skipped | None:
        """The reason to try nothing new, once something fits: time would be up before a candidate ends that takes as
        long as the longest so far, or nothing has gained for a while."""
        if self.best is None:
            return None
        if self.work.seconds + self.longest_s > self.until_s:
            return Skipped.OUT_OF_TIME
        until_s = (1 + self.patience * MOST_WORK) * self.gained_s
        goes_on = self.plans <= self.patience * MOST_PLANS or self.work.seconds <= until_s
        return None if goes_on else Skipped.NO_GAIN

    @property
    def is_late(self) -> bool:
        """Whether time is up, or the search over."""
        return self.work.seconds > self.until_s or self.reason_to_end is not None

    def is_owed(self, candidate: Candidate) -> bool:
        """Whether a candidate is judged though the time is up: a named strategy, and the first of a partitioner or of a
        mapping; none in a search that was to be short."""
        all_s = self.wishes.search_s
        has_time = SEARCH_S <= all_s <= self.until_s and self.work.seconds + self.longest_s < (1 + OWED) * all_s
        return has_time and (candidate.name in STRATEGIES or not candidate.cut_and_mapping <= self.judged)

    @property
    def enough(self) -> Skipped | None:
        """The reason to end the search, once something fits; None where numbers of micro-batches that were not looked
        at yet might undercut all bounds."""
        if self.best is None or not self.bounds_s.keys() >= set(self.usual):
            return None
        left_s = self.best.step_s - min(self.bounds_s.values())
        if left_s <= NEAR * self.best.step_s:
            return Skipped.NEAR_BOUND
        steps = self.wishes.steps
        if steps is not None and left_s * steps < self.work.seconds:
            return Skipped.NOT_WORTH_IT
        return None

    def is_large(self, count: int) -> bool:
        return len(self.compiler(count).graph.nodes) > LARGE_GRAPH_NODES

    def compiler(self, count: int) -> CandidateCompiler:
        if count not in self.compilers:
            options = dataclasses.replace(self.wishes.options, micro_batches=count)
            decided = dict(self.wishes.decided.decisions.model_copy(deep=True)) if self.wishes.decided else None
            graph = self.trace(count)
            self.work.add(TRACE_S * len(graph.nodes))
            self.compilers[count] = CandidateCompiler(
                graph, self.hardware, options, decided, self.wishes.dump, self.work
            )
        return self.compilers[count]

    @property
    def progress(self) -> Progress:
        best_s = None if self.best is None else self.best.step_s
        return Progress(len(self.trials), best_s, min(self.bounds_s.values(), default=0.0), self.wishes.is_asked)

    @property
    def best_candidate(self) -> Candidate:
        return PLAIN if self.best is None else self.best.candidate

    def look(self, count: int, candidates: Iterable[Candidate]) -> None:
        """Try each candidate that was not tried with `count` micro-batches before, with the passes that the user's
        options ask for."""
        for plain in candidates:
            candidate = plain.add_wishes(self.wishes.options)
            if (count, candidate) not in self.done:
                self.done.add((count, candidate))
                begin_s = self.work.seconds
                self.trials.append(self.attempt(count, candidate))
                if not isinstance(self.trials[-1].reason, Skipped):
                    self.judged |= candidate.cut_and_mapping
                self.longest_s = max(self.longest_s, self.work.seconds - begin_s)
                logger.info(self.progress)
                if self.best is None and candidate.marks and self._lacks_device(self.trials[-1], count):
                    self.look(count, [candidate.travelling()])

    def _lacks_device(self, trial: Trial, count: int) -> bool:
        """Whether a candidate lacks a device's memory, in which something may stay that need not."""
        lacks = isinstance(trial.reason, DoesNotFit) and tier_of(trial.reason.memory) == ops.DEVICE
        return lacks and len({param.requires_grad for param in self.compiler(count).graph.parameters().values()}) > 1

    def attempt(self, count: int, candidate: Candidate) -> Trial:
        if self.excess_bytes > 0 and not candidate.uses_ssd:
            return Trial(candidate, count, reason=self.too_large_without_ssds())
        if self.reason_to_end is not None and not self.is_owed(candidate):
            return Trial(candidate, count, reason=self.reason_to_end)
        enough = self.enough
        if enough is not None:
            return Trial(candidate, count, reason=enough)
        if candidate.uses_ssd and not self.has_ssds and self.wishes.asked is None:
            return Trial(candidate, count, reason=Skipped.NO_SSDS)
        compiler = self.compiler(count)
        try:
            placed = compiler.place(candidate)
            if count not in self.bounds_s:
                self.bounds_s[count] = machine_bound(placed.draft).seconds
            for field_of, key in placed.keys:
                same = self.seen.get((count, key))
                if same is not None and (not field_of or getattr(same, field_of)):
                    return dataclasses.replace(same, candidate=candidate, reason=SamePlan(same.name))
            bound = placed.bound()
            if self.best is not None and bound.seconds >= self.best.step_s:
                found = Trial(candidate, count, reason=Pruned(bound.seconds, bound.by))
            else:
                compiled = compiler.finish(placed)
                if self.wishes.require is not None:
                    self.wishes.require(compiled.draft.programs)
                fetched, again = (compiled.decisions.get(name, ()) for name in ("fetch", "rematerialise"))
                draft = compiled.draft
                tiers = bool(fetched), len(fetched) == len(draft.stages), not fetched and not again
                alone = not sharing(draft.programs, draft.lane_hardware)
                found = Trial(candidate, count, compiled.step_s, None, *tiers, alone, placed.cut)
                self.keep(compiled)
            for field_of, key in placed.keys:
                if not field_of or getattr(found, field_of):
                    self.seen.setdefault((count, key), found)
        except (DoesNotFit, PassError, PlanError) as error:
            return Trial(candidate, count, reason=error.with_traceback(None))
        return found

    @cached_property
    def excess_bytes(self) -> int:
        """The least lasting bytes that devices and DRAM cannot hold; 0 where they might hold all."""
        return max(0, self.wishes.lasting_bytes - self.dram_bytes - self.device_bytes)

    @property
    def dram_bytes(self) -> int:
        return sum(self.hardware.dram_budget_bytes(host) for host in range(len(self.hardware.hosts)))

    @property
    def device_bytes(self) -> int:
        return sum(device.budget_bytes for device in self.hardware.devices)

    def too_large_without_ssds(self) -> DoesNotFit:
        """The error of all pipelines that keep nothing on SSD: known before any graph is cut."""
        missing = self.excess_bytes
        return DoesNotFit(
            f"what lasts between steps needs {format_bytes(self.wishes.lasting_bytes)}; there is "
            f"{format_bytes(self.dram_bytes)} of DRAM usable, and {format_bytes(self.device_bytes)} on the devices: "
            f"missing {format_bytes(missing)}, and these passes keep nothing on SSD. Nearest that may fit: "
            "strategy='auto' or 'mobius-ssd', which do",
            memory="dram0",
            missing_bytes=missing,
        )

    def trial_of(self, count: int, candidate: Candidate) -> Trial:
        return next(trial for trial in self.trials if (trial.count, trial.candidate) == (count, candidate))

    def keep(self, compiled: CompiledCandidate) -> None:
        """Make this the best if it is faster, or as fast with a smaller burden; of equals the earlier one stays."""
        best = self.best
        same = best is not None and abs(compiled.step_s - best.step_s) <= SAME * best.step_s
        self.plans += 1
        if best is None or compiled.step_s < (1 - GAIN) * best.step_s:
            self.renew_patience()
        if best is None or (compiled.burden < best.burden if same else compiled.step_s < best.step_s):
            self.best = compiled

    def renew_patience(self) -> None:
        """Count plans and work without a gain from now on."""
        self.gained_s, self.plans = self.work.seconds, 0

    def result(self) -> SearchResult:
        """The best candidate, proven, and why the others lost. One that cannot be proven makes room for the next."""
        while self.best is not None:
            try:
                best = prove(self.best)
            except DoesNotFit as error:
                self.refuse(error)
                continue
            return SearchResult(best, [t.rival(best.step_s) for t in self.trials if t.name != best.name])
        raise nearest_miss(errors_of(self.trials))

    def refuse(self, error: DoesNotFit) -> None:
        """Record that the best candidate cannot run, and compile the next one."""
        assert self.best is not None
        failed, self.best = self.best.name, None
        alike = [t for t in self.trials if t.name == failed or t.reason == SamePlan(failed)]
        self.trials = [t if t not in alike else dataclasses.replace(t, step_s=None, reason=error) for t in self.trials]
        left = sorted((t for t in self.trials if t.step_s is not None), key=lambda t: t.step_s or 0.0)
        self.seen.clear()
        for row in left[:1]:
            self.attempt(row.count, row.candidate)

    def fastest(self) -> list[Trial]:
        """The trials that were simulated, without named candidates, the fastest first."""
        rows = [t for t in self.trials if t.step_s is not None and not t.candidate.name]
        return sorted(rows, key=lambda t: t.step_s or 0.0)

    def fastest_on(self, mesh: Mesh | None) -> list[Trial]:
        """The fastest trials of one layout of lanes."""
        return [trial for trial in self.fastest() if trial.candidate.mesh == mesh]

    def seen_s(self, mesh: Mesh) -> float:
        """The shortest step that the trials of a layout take at least; 0 where they tell nothing."""
        of_mesh = [trial for trial in self.trials if trial.candidate.mesh == mesh and not trial.candidate.name]
        found = [t.reason.bound_s if isinstance(t.reason, Pruned) else t.step_s or 0.0 for t in of_mesh]
        return min((step_s for step_s in found if step_s), default=0.0)

    def lane_of(self, candidate: Candidate, count: int) -> Draft | None:
        """The draft of one of the candidate's lanes; None, and a trial with the reason, where a pass refuses it."""
        try:
            return self.compiler(count).lane(candidate)
        except PassError as error:
            self.trials.append(Trial(candidate, count, reason=error))
            return None

    @property
    def lacks_host_memory(self) -> bool:
        """Whether a candidate failed for lack of DRAM, or of SSDs, and not of a device's memory."""
        errors = errors_of(self.trials)
        return any(isinstance(error, DoesNotFit) and tier_of(error.memory) != ops.DEVICE for error in errors)
