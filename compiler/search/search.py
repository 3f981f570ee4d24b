"""From (graph, hardware, wishes) to the plan that the simulator likes best, with the rivals and why they lost.

The search goes down by coordinates. Scouts show which number of micro-batches promises most; there every strategy,
partitioner and mapping is tried, then schedules and tiers of the best; if the winner does better with another number of
micro-batches, that one is swept as well. A candidate whose lower bound is no better than the best is not compiled, nor
one that comes to the same programs as another. What is left when time is up is listed as such.

Where scouts lack DRAM and there are SSDs, all candidates are such that use them. Where DRAM holds everything, the best
is also tried with activations that move, and with an optimizer under the backward pass.

Layouts of several lanes (`layouts.py`) compete with one pipeline over all devices. On a fleet they come first: a few of
them with a few recipes each, then everything with the best.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ...ir.errors import DoesNotFit, PassError, PenstockError, PlanError
from ...ir.machine.hardware import Hardware
from ...ir.program import WRITTEN_OUT
from ...ir.units import format_bytes, format_seconds
from ...passes.draft import Options
from ...passes.graph.opgraph import OpGraph
from ..plan import SAME_PLAN, Plan, Rival
from ..strategies import STRATEGIES, is_synchronous
from .candidates import (
    IN_ORDER,
    Recipe,
    lane_scouts,
    mappings,
    micro_batch_counts,
    more_of_mip,
    partitions,
    schedules,
    scouts,
)
from .layouts import Outlook, outlooks, varied
from .trial import Bench, Candidate, DumpPrograms, prove

Trace = Callable[[int], OpGraph]  # number of micro-batches -> op graph of one micro-batch
LARGE_GRAPH_NODES = 2000  # above this the sweep keeps to one number of micro-batches: each needs a trace of its own
SEARCH_S = 33.0  # of computation
LEADERS = 3  # partitions whose schedules and tiers are tried
OUT_OF_TIME = "not tried: out of time"
HOST_MEMORIES = ("dram", "ssd")
MOST_LAYOUTS, BEST_LAYOUTS = 10, 2  # of a fleet, with some number of micro-batches: that are looked at, that are swept
LAYOUTS_SHARE = 0.6  # of the time, for the former
RESERVOIR = Recipe(activations=True, reservoir=True)


@dataclass
class Wishes:
    """What the user fixed. None or "auto" leaves it to the search. `search_s`: seconds of computation after which
    nothing new is tried, once something fits. `beyond_dram_bytes`: see `check_states_fit`."""

    strategy: str
    micro_batches: int | None
    batch_size: int
    options: Options
    dump: DumpPrograms | None = None
    decided: Plan | None = None
    search_s: float = SEARCH_S
    beyond_dram_bytes: int = 0  # of what lasts between steps, what devices and DRAM cannot hold at least


@dataclass
class Found:
    """What the search chose, and what it beat."""

    best: Candidate
    rivals: list[Rival] = field(default_factory=list)


@dataclass(frozen=True)
class Tried:
    """One candidate that was looked at: its step, or why there is none."""

    recipe: Recipe
    count: int  # of micro-batches
    step_s: float | None = None
    error: PenstockError | None = None
    reason: str = ""
    all_swapped: bool = False  # no stage's weights stay on a device

    @property
    def name(self) -> str:
        return name_of(self.recipe, self.count)


def name_of(recipe: Recipe, count: int) -> str:
    return f"{recipe.label}, {count} micro-batches"


def search(trace: Trace, hardware: Hardware, wishes: Wishes) -> Found:
    """Try what `wishes` leave open and keep the fastest simulated candidate; the first of equals.

    Raises `DoesNotFit` with the nearest miss if none fits.
    """
    sweep = Sweep(trace, hardware, wishes)
    if wishes.strategy == "auto" and wishes.decided is None:
        sweep.everything()
    else:
        sweep.one(wishes.decided.passes if wishes.decided else wishes.strategy)
    return sweep.result()


class Sweep:
    """The search under way."""

    def __init__(self, trace: Trace, hardware: Hardware, wishes: Wishes):
        self.trace, self.hardware, self.wishes = trace, hardware, wishes
        self.best: Candidate | None = None
        self.best_recipe = Recipe()
        self.tried: list[Tried] = []
        self.benches: dict[int, Bench] = {}
        self.seen: dict[tuple[int, str], Tried] = {}  # what came to which programs
        self.done: set[tuple[int, Recipe]] = set()
        self.until_s = time.process_time() + wishes.search_s
        self.has_ssds = any(host.ssds for host in hardware.hosts)
        self.base = Recipe()  # what all candidates but named ones have in common
        self.usual, self.last_resort = micro_batch_counts(wishes.batch_size, hardware)
        if wishes.micro_batches is not None:
            self.usual, self.last_resort = [wishes.micro_batches], []

    def one(self, line: str) -> None:
        """A line that the user gave: only the number of micro-batches is open."""
        for i, count in enumerate((*self.usual, *self.last_resort)):
            if self.best is not None and (i >= len(self.usual) or self.is_large(count)):
                return
            self.look(count, [Recipe(named=line)])

    def everything(self) -> None:
        """See the module's text."""
        if self.hardware.num_devices > WRITTEN_OUT:
            self.fleet()
            return
        for base in self.bases():
            self.base = base
            self.scout()
            if self.best is None and base != RESERVOIR and self.has_ssds and self.lacks_host_memory:
                continue
            for count in (*self.usual, *self.last_resort) if self.best is None else ():
                if self.best is None and not (self.is_late and self.tried):
                    self.sweep(count)
            if self.best is not None:
                break
        self.best_of_counts()

    def best_of_counts(self) -> None:
        """Everything with the best's number of micro-batches, and the best with others, until none of these is it."""
        swept: set[int] = set()
        while self.best is not None and self.count not in swept:
            swept.add(self.count)
            self.sweep(self.count)
            for other in self.promising():
                self.look(other, [self.best_recipe])

    def fleet(self) -> None:
        """Of many devices: first which layout and how many micro-batches, then everything with the best of these. A
        layout whose lower bound is no better than the best is not looked at."""
        for base in self.bases():
            begin_s, until_s = time.process_time(), self.until_s
            self.until_s = begin_s + LAYOUTS_SHARE * (until_s - begin_s)
            for row in varied(outlooks(self.bench(self.usual[0]).base, self.usual), MOST_LAYOUTS):
                self.look_at(row, base)
            self.until_s = until_s
            if self.best is not None:
                break
        for layout in list(dict.fromkeys(row.recipe.layout for row in self.fastest()))[:BEST_LAYOUTS]:
            first = next(row for row in self.fastest() if row.recipe.layout == layout)
            self.base = base.but(layout=layout)
            for count in (first.count, *self.usual):
                self.look(count, [first.recipe, first.recipe.but(hold=True)])
            here = next(row for row in self.fastest() if row.recipe.layout == layout)
            self.sweep(here.count)

    def look_at(self, row: Outlook, base: Recipe) -> None:
        """Scouts of a layout with several lanes."""
        recipe = base.but(layout=row.layout)
        if self.best is not None and row.bound_s >= self.best.step_s:
            reason = f"pruned: cannot be below {format_seconds(row.bound_s)}"
            self.tried.append(Tried(recipe, row.count, reason=reason))
            return
        if self.best is not None and self.is_late:
            self.tried.append(Tried(recipe, row.count, reason=OUT_OF_TIME))
            return
        try:
            lane = self.bench(row.count).lane(row.layout)
        except PassError as error:
            self.tried.append(Tried(recipe, row.count, error=error))
            return
        first = lane_scouts(lane, recipe)
        self.look(row.count, first)
        if row.layout.shards > 1 and self.best is None:  # what is gathered whole must be smaller
            self.look(row.count, [first[0].but(partition=IN_ORDER[0], swap=True)])

    def hybrids(self, count: int) -> None:
        """Of a few devices every layout of several lanes, with this number of micro-batches."""
        if self.base.layout.depth or self.hardware.num_devices == 1:
            return
        for row in outlooks(self.bench(count).base, [count]):
            self.look_at(row, self.base)
        if self.best_recipe.layout.depth:
            before, self.base = self.base, self.base.but(layout=self.best_recipe.layout)
            self.sweep(count)
            self.base = before

    def bases(self) -> list[Recipe]:
        """What all candidates are like; the next where nothing of the one before fits."""
        if not self.has_ssds:
            return [Recipe()]
        return [RESERVOIR] if self.wishes.beyond_dram_bytes > 0 else [Recipe(), RESERVOIR]

    def scout(self) -> None:
        """Every number of micro-batches that promises something; if nothing fits, others until something does."""
        counts = self.promising()
        for count in (*counts, *(m for m in (*self.usual, *self.last_resort) if m not in counts)):
            if count in counts or self.best is None:
                self.look(count, scouts(self.bench(count).base, self.base))

    @property
    def lacks_host_memory(self) -> bool:
        """Whether a candidate came as far as to lack DRAM, or SSDs."""
        return any(isinstance(t.error, DoesNotFit) and t.error.memory.startswith(HOST_MEMORIES) for t in self.tried)

    def promising(self) -> list[int]:
        """Numbers of micro-batches to try; of a large model, whose traces take long, only one."""
        return self.usual[:1] if self.is_large(self.usual[0]) else self.usual

    def sweep(self, count: int) -> None:
        """Everything with this number of micro-batches, in order of what may not be left out when time is short: the
        named strategies, every partitioner, every mapping, schedules and tiers; then what is between. Where the base
        has a layout of several lanes, of that alone."""
        lane = self.bench(count).lane(self.base.layout)
        cuts, maps = list(partitions(lane, self.base)), mappings(lane.lane_hardware)
        usual = [self.base.but(partition=cut, mapping=maps[0]) for cut in cuts]
        named = [Recipe(named=name) for name in STRATEGIES if is_synchronous(name) and not self.base.layout.depth]
        self.look(count, [r for r in named if not r.is_slow and (r.uses_ssd or not self.base.reservoir)])
        self.look(count, [recipe for recipe in usual if not recipe.is_slow])
        self.look(count, [row.recipe.but(mapping=mapping) for mapping in maps for row in self.leaders(count)[:1]])
        self.look(count, [recipe for row in self.leaders(count)[:1] for recipe in self.other_tiers(row.recipe)])
        self.hybrids(count)
        if not self.is_late and self.base.layout.shards == 1:
            more = more_of_mip(lane)
            self.look(count, [self.base.but(partition=cut, mapping=maps[0]) for cut in more])
        self.look(count, [*usual, *named])
        for row in self.leaders(count):
            swaps = (False,) if row.all_swapped and row.recipe.layout.shards == 1 else (False, True)
            options = itertools.product(schedules(lane.lane_hardware.num_devices), swaps)
            self.look(count, [row.recipe.but(schedule=schedule, swap=swap) for schedule, swap in options])
        best = self.best_recipe
        is_here = best.layout == self.base.layout and not best.named
        if is_here and best.but(partition="", mapping="") != self.base.but(partition="", mapping=""):
            self.look(count, [self.best_recipe.but(partition=cut) for cut in cuts])
            self.look(count, [self.best_recipe.but(mapping=mapping) for mapping in maps])
            self.look(count, self.other_tiers(self.best_recipe))
        self.look(count, [self.base.but(partition=cut, mapping=mapping) for mapping in maps for cut in cuts])

    def other_tiers(self, recipe: Recipe) -> list[Recipe]:
        """The same with and without activations that move, and an optimizer under the backward pass. Only where there
        are SSDs: elsewhere few gain by it, and each takes as long as another partition. Shared stages are all computed
        again, or not."""
        if recipe.layout.shards > 1:
            return [recipe.but(swap=swap) for swap in (True, False)]
        if not self.has_ssds:
            return []
        both = itertools.product((True, False), (True,) if self.base.reservoir else (True, False))
        return [recipe.but(activations=activations, reservoir=reservoir) for activations, reservoir in both]

    def leaders(self, count: int) -> list[Tried]:
        """The fastest so far, of each partition its best mapping."""
        rows = [t for t in self.fastest() if t.count == count and t.recipe.layout == self.base.layout]
        best: dict[float, Tried] = {}  # of those that come to the same plan one
        for row in rows:
            if row.recipe.partition not in [leader.recipe.partition for leader in best.values()]:
                best.setdefault(row.step_s or 0.0, row)
        return list(best.values())[:LEADERS]

    def fastest(self) -> list[Tried]:
        """What was simulated, but for named lines, the fastest first."""
        rows = [t for t in self.tried if t.step_s is not None and not t.recipe.named]
        return sorted(rows, key=lambda t: t.step_s or 0.0)

    @property
    def count(self) -> int:
        """Micro-batches of all lanes together."""
        assert self.best is not None
        return self.best.draft.programs[0].interface.total_micro_batches

    @property
    def is_late(self) -> bool:
        return time.process_time() > self.until_s

    def is_large(self, count: int) -> bool:
        return len(self.bench(count).graph.nodes) > LARGE_GRAPH_NODES

    def bench(self, count: int) -> Bench:
        if count not in self.benches:
            options = dataclasses.replace(self.wishes.options, micro_batches=count)
            decided = dict(self.wishes.decided.decisions.model_copy(deep=True)) if self.wishes.decided else None
            self.benches[count] = Bench(self.trace(count), self.hardware, options, decided, self.wishes.dump)
        return self.benches[count]

    def look(self, count: int, recipes: Iterable[Recipe]) -> None:
        """Try each recipe that was not tried yet."""
        for recipe in recipes:
            if (count, recipe) not in self.done:
                self.done.add((count, recipe))
                self.tried.append(self.attempt(count, recipe))

    def attempt(self, count: int, recipe: Recipe) -> Tried:
        if self.best is not None and self.is_late:
            return Tried(recipe, count, reason=OUT_OF_TIME)
        if recipe.uses_ssd and not self.has_ssds and self.wishes.strategy == "auto":
            return Tried(recipe, count, reason="needs SSDs, of which there are none")
        bench = self.bench(count)
        try:
            started = bench.start(recipe.line)
            key = (count, started.key)
            if key in self.seen:
                same = self.seen[key]
                return dataclasses.replace(same, recipe=recipe, reason=f"{SAME_PLAN} {same.name}")
            bound = started.bound()
            if self.best is not None and bound.seconds >= self.best.step_s:
                found = Tried(recipe, count, reason=f"pruned: cannot be below {format_seconds(bound.seconds)}")
            else:
                candidate = bench.finish(name_of(recipe, count), started)
                fetched = candidate.decisions["fetch"]
                swapped = len(fetched) == len(candidate.draft.stages)
                found = Tried(recipe, count, candidate.step_s, all_swapped=swapped)
                self.keep(candidate, recipe)
            self.seen[key] = found
        except (DoesNotFit, PassError, PlanError) as error:
            return Tried(recipe, count, error=error.with_traceback(None))
        return found

    def keep(self, candidate: Candidate, recipe: Recipe) -> None:
        """The faster of the two; of equals the earlier one."""
        if self.best is None or candidate.step_s < self.best.step_s:
            self.best, self.best_recipe = candidate, recipe

    def result(self) -> Found:
        """The best one, proven, and why the others are not it. Whoever cannot be proven makes room for the next."""
        while self.best is not None:
            try:
                best = prove(self.best)
            except DoesNotFit as error:
                self.refuse(error)
                continue
            return Found(best, [_rival(row, best.step_s) for row in self.tried if row.name != best.name])
        raise _nearest([t.error for t in self.tried if t.error is not None])

    def refuse(self, error: DoesNotFit) -> None:
        """The best cannot run; make the next one."""
        assert self.best is not None
        failed, self.best = self.best.name, None
        alike = [t for t in self.tried if t.name == failed or t.reason.endswith(failed)]
        self.tried = [t if t not in alike else dataclasses.replace(t, step_s=None, error=error) for t in self.tried]
        left = sorted((t for t in self.tried if t.step_s is not None), key=lambda t: t.step_s or 0.0)
        self.seen.clear()
        for row in left[:1]:
            self.attempt(row.count, row.recipe)


def attempt_smallest(trace: Trace, hardware: Hardware, wishes: Wishes) -> Candidate | PenstockError:
    """Of what `search` would try, what needs the least memory on devices: small micro-batches, many stages, and of
    models that are not large stages of single operators."""
    usual, last_resort = micro_batch_counts(wishes.batch_size, hardware)
    is_large = len(trace(wishes.micro_batches or usual[0]).nodes) > LARGE_GRAPH_NODES
    counts = [*usual, *last_resort] if is_large else [max(usual + last_resort)]
    sweep = Sweep(trace, hardware, dataclasses.replace(wishes, decided=None))
    for count in counts if wishes.micro_batches is None else [wishes.micro_batches]:
        recipes = [Recipe(named=wishes.strategy)]
        if wishes.strategy == "auto":
            recipes = [scouts(sweep.bench(count).base, base)[-1] for base in sweep.bases()]
            recipes += [] if is_large else [Recipe(named="ftpipe")]
        sweep.look(count, recipes)
        if sweep.best is not None or sweep.lacks_host_memory:
            break
    errors = [row.error for row in sweep.tried if row.error is not None]
    return sweep.best or _smallest_step(errors, max(device.memory_bytes for device in hardware.devices))


def _smallest_step(errors: list[PenstockError], memory_bytes: int) -> PenstockError:
    """The miss that asks for the least; one that cannot say how much is taken to ask for an eighth of the memory."""
    found = _nearest(errors)
    vague = [e for e in errors if isinstance(e, DoesNotFit) and e.memory in ("", "device") and not e.missing_bytes]
    if not isinstance(found, DoesNotFit) or found.memory.startswith(HOST_MEMORIES):
        return found
    return vague[0] if vague and found.missing_bytes > memory_bytes // 8 else found


def _rival(row: Tried, best_s: float) -> Rival:
    reason = row.reason
    if row.error is not None:
        reason = why_not(row.error)
    elif row.step_s is not None and not reason:
        slower = row.step_s / best_s - 1
        reason = "as fast, tried later" if slower <= 0 else f"{slower:.1%} slower ({format_seconds(row.step_s)})"
    return Rival(name=row.name, step_s=row.step_s, reason=reason, passes=row.recipe.line, micro_batches=row.count)


def why_not(error: PenstockError) -> str:
    """One line: which memory lacks how much, or the whole message where it says more than that."""
    if isinstance(error, DoesNotFit) and error.memory not in ("", "device") and error.missing_bytes:
        return f"does not fit: {error.memory} lacks {format_bytes(error.missing_bytes)}"
    text = " ".join(str(error).split())
    return f"does not fit: {text}" if isinstance(error, DoesNotFit) else text


def _nearest(errors: list[PenstockError]) -> PenstockError:
    """The miss by the fewest bytes, or the first one that is not about memory. A plan that lacks DRAM has passed every
    device, and no other plan needs much less: what a worse cut lacks on a device would mislead. Likewise one that lacks
    SSDs has come further than one that lacks DRAM."""
    if not errors:
        return PlanError("no candidate could be built for this model and hardware")
    short = [error for error in errors if isinstance(error, DoesNotFit)]
    for memory in reversed(HOST_MEMORIES):
        if found := [error for error in short if error.memory.startswith(memory)]:
            return min(found, key=lambda error: error.missing_bytes or 1 << 62)
    return min(short, key=lambda error: error.missing_bytes or 1 << 62) if short else errors[0]
