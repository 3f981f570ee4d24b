"""From (graph, hardware, wishes) to the candidate with the fastest simulated step, with the rivals and why they lost.

The search takes one coordinate after the other: scouts, which are cheap candidates, then layouts, then more
micro-batches, as long as that gains. With the best number every strategy, partitioner and mapping is tried, then
schedules and tiers of the best. If the winner is faster with another number, that one is swept as well. `attempts.py`
has what became of each candidate.

Where scouts lack DRAM and there are SSDs, all candidates use SSDs; where they lack device memory and there are none,
activations and inputs of stages go to DRAM. Where DRAM holds everything, the best is also tried with activations that
move, and with an optimizer under the backward pass; where devices fetch stages, with some that stay. Where devices
fetch weights through one root complex, the best are tried with turns on it. Before candidates that seldom win, one
thing of the best is exchanged at a time until nothing gains: what is computed again, tiles, chunks of logits, a stage
more or fewer.

Where a layer alone is too large for every device, sequences are cut into tiles from the beginning, elsewhere where
nothing else fits; where memory is short, the best is tried with tiles, too.

Layouts of several lanes (`layouts.py`) compete with one pipeline over all devices. On a fleet they come first: a few of
them with a few candidates each, then everything with the best. On few devices those whose estimates are faster than the
best scout come right after the scouts. Where rows are long, or nothing else fits, a team of
lanes may share each sequence (`teams.py`). Teams that divide weights, by columns or by experts, come before all sweeps,
in the order of their estimates (`team_estimate.py`), with a share of the work; where one is best, its layout is swept
before the machine without lanes. Strategies by name come before them: a team takes long to divide, and many promise
less than the best of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

from ...ir.errors import DoesNotFit, PassError, PenstockError, PlanError
from ...ir.machine.hardware import Hardware
from ...ir.program import WRITTEN_OUT
from ...passes.draft import Draft
from ...passes.partition.partition_balanced import PartitionBalanced
from ...passes.partition.slices import Slices
from ...passes.rewrite.graph_pass import GraphPass
from ...passes.rewrite.recompute_pointwise import RecomputePointwise
from ...passes.rewrite.split_context import SplitContext
from ...passes.rewrite.split_experts import SplitExperts
from ...passes.rewrite.split_linear import SplitLinear
from ...passes.rewrite.split_vocabulary import SplitVocabulary
from ...passes.rewrite.split_width import SplitWidth
from ...passes.rewrite.tile_sequence import TileSequence
from ...passes.table import PASSES
from ..strategies import STRATEGIES
from .attempts import GAIN, LARGE_GRAPH_NODES, Attempts, SearchResult, Trace, Wishes
from .candidate import KEEPING, LEAVING, PLAIN, RESERVOIR, Candidate
from .candidates import (
    divisors,
    lane_scouts,
    micro_batch_counts,
    scouts,
)
from .compiled import CompiledCandidate
from .layouts import LayoutEstimate, diverse_layouts, estimates
from .moves import Position, layout_scouts, on_best_mesh, proposals, quick_strategies
from .team_estimate import TeamEstimate, TeamEstimator
from .teams import context_candidates, has_experts, has_long_rows, team_meshes
from .trial import Trial, errors_of, smallest_step

AGAIN, TILES = RecomputePointwise(), TileSequence()
MANY_BLOCKS = 500  # a program of one block a stage takes minutes then, where fewer stages often do
MOST_LAYOUTS, BEST_LAYOUTS = 10, 2  # layouts of a fleet that are looked at, and of these that are swept
LAYOUTS_SHARE = 0.6  # of the time, for looking at layouts
MOST, TEAMS_SHARE = 6, 0.6  # teams and layouts that are looked at where something fits, and the share of the work
GRADIENT_TOO = 3  # times a layer's weights: with their gradients, and a gradient that is added to these


def search(trace: Trace, hardware: Hardware, wishes: Wishes) -> SearchResult:
    """Try what `wishes` leave open and keep the fastest simulated candidate; of equals the lightest one.

    Raises `DoesNotFit` with the nearest miss if none fits.
    """
    sweep = Sweep(trace, hardware, wishes)
    if wishes.decided is not None:
        sweep.one(Candidate.parse(wishes.decided.passes, hardware.num_devices))
    elif wishes.asked is not None:
        sweep.one(wishes.asked)
    else:
        sweep.everything()
    return sweep.result()


class Sweep(Attempts):
    """The search under way."""

    def __init__(self, trace: Trace, hardware: Hardware, wishes: Wishes):
        super().__init__(trace, hardware, wishes)
        self.base = PLAIN  # what all candidates but named ones have in common

    def one(self, candidate: Candidate) -> None:
        """Try the candidate that the user asked for: only the number of micro-batches is open. Where a strategy does
        not fit, and a table is too large, it is tried with parts of tables."""
        if candidate.name in STRATEGIES and self.parts[1]:
            self.few_micro_batches()
        for asked in self.with_parts([candidate]) if candidate.name in STRATEGIES else [candidate]:
            for i, count in enumerate((*self.usual, *self.last_resort)):
                if self.best is not None and (i >= len(self.usual) or self.is_large(count)):
                    return
                self.look(count, [asked])

    def everything(self) -> None:
        """Search as the module's docstring says."""
        if self.hardware.num_devices > WRITTEN_OUT:
            self.fleet()
            return
        if self.parts[1]:
            self.few_micro_batches()
        bases = self.bases()
        self.first_that_fits(bases)
        if self.best is None and not any(TILES in base.graph_passes for base in bases):
            self.first_that_fits(self.with_tiles(bases))
        if self.hardware.num_devices > 1:
            self.look_at_teams_and_lanes(next(base for base in bases if TILES not in base.graph_passes))
        self.more_micro_batches()
        self.best_of_counts()
        if self.hardware.num_devices > 1 and (self.best is None or has_long_rows(self.compiler(self.usual[0]).graph)):
            self.renew_patience()  # what gained nothing so far says nothing of teams
            self.share_sequences()

    def first_that_fits(self, bases: Sequence[Candidate]) -> None:
        """Try the bases in order until something fits."""
        for base in bases:
            self.base = base
            self.scout()
            if self.has_ssds and not self.lacks_host_memory:  # without SSDs, what needs less memory is tried first
                self.sweep_until_one_fits()
            if self.best is not None:
                return
        if self.lacks_host_memory:  # which stages that stay on devices relieve
            for base in self.with_parts([KEEPING]):
                self.base = base
                self.scout()
                if self.best is not None:
                    return
        for base in reversed(bases):
            self.base = base
            self.sweep_until_one_fits()

    def share_sequences(self) -> None:
        """Try teams that share sequences, with the fewest micro-batches that they can share out; where layers are too
        large, also with tiles of a member's tokens, and with activations that move."""
        bases = self.bases()
        base = next(base for base in bases if TILES not in base.graph_passes)
        for team, mesh in team_meshes(self.hardware):
            teams = self.hardware.num_devices // team
            count = next((n for n in sorted({*self.usual, *self.last_resort}) if n % teams == 0), None)
            if count is None:
                continue
            if self.reason_to_end is not None:
                self.trials.append(Trial(base.on(mesh), count, reason=self.reason_to_end))
                continue
            lane = self.compiler(count).lane(base)
            experts = mesh.shards == 1 or not has_experts(lane.graph)  # parts of weights are not spread once more
            for found in context_candidates(base, lane, team, experts):
                if isinstance(found, PassError):
                    self.trials.append(Trial(base.on(mesh), count, reason=found))
                    continue
                candidates = [found.on(mesh)]
                if TILES in bases[0].graph_passes:
                    tiled = found.with_graph_passes(*found.graph_passes, TILES).on(mesh)
                    candidates += [tiled] if tiled.is_shared else [tiled, tiled.leaving()]
                for candidate in candidates:
                    if self.reason_to_end is not None:  # dividing a model's layers takes as long as a plan
                        self.trials.append(Trial(candidate, count, reason=self.reason_to_end))
                        continue
                    self.look(count, lane_scouts(self.compiler(count).lane(candidate), candidate, mesh))

    def sweep_until_one_fits(self) -> None:
        """Make moves until something fits; those that are left come after teams, in `best_of_counts`."""
        for count in (*self.usual, *self.last_resort):
            moves = proposals(Position(self, count, self.base))
            while self.best is None and not (self.is_late and self.trials) and (candidate := next(moves, None)):
                self.look(count, [candidate])

    def best_of_counts(self) -> None:
        """Sweep the best candidate's number of micro-batches and try it with others, until it has been swept with its
        own number."""
        swept: set[int] = set()
        while self.best is not None and self.best.count not in swept:
            swept.add(self.best.count)
            if self.is_in_teams(self.best_candidate):
                begin_s, until_s = self.work.seconds, self.until_s
                self.until_s = begin_s + TEAMS_SHARE * (until_s - begin_s)
                self.look(self.best.count, on_best_mesh(self, self.best.count, self.base))
                self.until_s = until_s
            self.sweep(self.best.count)
            for other in self.promising():
                self.look(other, [self.best_candidate])

    @staticmethod
    def is_in_teams(candidate: Candidate) -> bool:
        return candidate.find(SplitContext) is not None or candidate.find(SplitWidth) is not None

    def fleet(self) -> None:
        """Search for many devices: first layouts and numbers of micro-batches, then everything with the best of these.
        A layout whose lower bound is no better than the best is not looked at."""
        for base in self.bases():
            begin_s, until_s = self.work.seconds, self.until_s
            self.until_s = begin_s + LAYOUTS_SHARE * (until_s - begin_s)
            for row in diverse_layouts(estimates(self.compiler(self.usual[0]).lane(base), self.usual), MOST_LAYOUTS):
                self.look_at(row, base)
            self.until_s = until_s
            if self.best is not None:
                break
        meshes = [mesh for trial in self.fastest() if (mesh := trial.candidate.mesh)]
        for mesh in list(dict.fromkeys(meshes))[:BEST_LAYOUTS]:
            self.base = base.on(mesh)
            first = self.fastest_on(mesh)[0]
            for count in (first.count, *self.usual):
                self.look(count, [first.candidate, first.candidate.holding(True)])
            self.sweep(self.fastest_on(mesh)[0].count)

    def look_at(self, row: LayoutEstimate, base: Candidate) -> None:
        """Try scouts of a layout with several lanes."""
        self.look(row.count, layout_scouts(self, row, base))

    def look_at_teams_and_lanes(self, base: Candidate) -> None:
        """Try teams whose members divide the width of layers or have some of the experts each, where theory says that
        this may win, and layouts of lanes: those with the shortest estimates first, within a share of the work. Where
        nothing fits yet, all teams are tried; else what by its estimate is faster than the best plan."""
        kinds = [width for width, may in ((True, self.may_divide_width(base)), (False, self.has_experts())) if may]
        if not kinds and self.best is None:
            return
        compiler, rows = self.compiler(self.usual[0]), self.wishes.batch_size
        able = divisors(rows) if self.wishes.micro_batches is None else self.usual
        teams = TeamEstimator(compiler.lane(_drop_divisions(base, True)))
        tries = [(row, width) for width in kinds for row in teams.estimates(width, able, rows)]
        tries.sort(key=lambda each: each[0].estimate_s)
        first = list({(width, row.members, row.mesh): (row, width) for row, width in reversed(tries)}.values())[::-1]
        ways: list[tuple[float, Callable[[], None]]] = [
            (row.estimate_s, partial(self.look_at_team, base, row, width)) for row, width in first
        ]
        if self.best is not None:
            if kinds:  # tried in any case
                self.look(self.best.count, quick_strategies(self.base, self.hardware.num_devices))
            lanes = {row.mesh: row for row in reversed(estimates(compiler.lane(base), self.usual))}.values()
            ways += [(row.estimate_s, partial(self.look_at, row, base)) for row in lanes]
            least_s = min(self.best.step_s, teams.alone_s(able) if teams.disk_s else math.inf)
            ways = sorted((way for way in ways if way[0] < least_s), key=lambda way: way[0])[:MOST]
        begin_s, until_s = self.work.seconds, self.until_s
        self.until_s = begin_s + TEAMS_SHARE * (until_s - begin_s)
        for estimate_s, look in sorted(ways, key=lambda way: way[0]):
            if self.best is None or estimate_s < self.best.step_s:
                look()
        self.until_s = until_s

    def may_divide_width(self, base: Candidate) -> bool:
        """Whether theory sees a use for parts of layers: where nothing fits, where rows are too few to give each device
        some, where a layer takes most of a device, and where weights would else be gathered between hosts."""
        few_rows = self.wishes.batch_size < self.hardware.num_devices
        if self.best is None or few_rows or len(self.hardware.hosts) > 1:
            return True
        blocks = self.compiler(self.usual[0]).lane(_drop_divisions(base, True)).blocks
        room = min(device.budget_bytes for device in self.hardware.devices)
        return GRADIENT_TOO * max(block.param_bytes for block in blocks) > room

    def has_experts(self) -> bool:
        return has_experts(self.compiler(self.usual[0]).graph)

    def look_at_team(self, base: Candidate, row: TeamEstimate, width: bool) -> None:
        """Try scouts of a team's layout."""
        whole = _drop_divisions(base, width)
        split = SplitWidth(row.members) if width else SplitContext("rows", row.members)
        candidate = whole.with_graph_passes(*whole.graph_passes, split).on(row.mesh)
        if self.reason_to_end is not None:
            self.trials.append(Trial(candidate, row.count, reason=self.reason_to_end))
            return
        lane = self.lane_of(candidate, row.count)
        if lane is not None and lane.graph.divided:  # else members are replicas
            self.look(row.count, lane_scouts(lane, candidate, row.mesh))

    def bases(self) -> list[Candidate]:
        """The candidates that others are made from; each is used only where nothing made from the one before fits."""
        if not self.has_ssds:
            usual = [PLAIN, LEAVING]
        else:
            usual = [RESERVOIR] if self.excess_bytes > 0 else [PLAIN, RESERVOIR]
        plain = self.with_parts([*usual, *(base.with_graph_passes(*base.graph_passes, AGAIN) for base in usual)])
        tiled = self.with_tiles(usual)
        return [*(tiled if tiled and self.has_large_layers() else ()), *plain]

    def with_tiles(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates with token-wise parts in tiles of tokens; none where no part is large for a device."""
        draft = Draft(self.compiler(self.usual[0]).graph, self.hardware, self.wishes.options)
        return [base.with_graph_passes(*base.graph_passes, TILES) for base in candidates] if TILES.plan(draft) else []

    def has_large_layers(self) -> bool:
        """Whether a layer alone, with what it saves, is too large for every device, whatever the micro-batch."""
        counts = dict.fromkeys((self.usual[0], max([*self.usual, *self.last_resort])))
        try:
            split, must = self.parts
            base = PLAIN.with_graph_passes(*PLAIN.graph_passes, *(split if must else ()))
            return all(Slices(self.compiler(count).lane(base)).fewest() is None for count in counts)
        except (DoesNotFit, PassError, PlanError):
            return False

    def with_parts(self, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates, and after them, where a table or a layer is large for a device, the same with its rows in
        parts; only these where whole layers are too large for every device."""
        split, must = self.parts
        whole = [] if must else candidates
        return [*whole, *(each.with_graph_passes(*each.graph_passes, *split) for each in candidates if split)]

    def few_micro_batches(self) -> None:
        """Begin with the fewest micro-batches whose rows fit beside a part: in parts, a layer is many stages, each
        takes longer to fetch than to compute, and each further micro-batch adds a turn of every stage."""
        counts = sorted({*divisors(self.wishes.batch_size), *self.usual, *self.last_resort})
        if self.wishes.micro_batches is None and not self.wishes.fewest_first:
            draft = Draft(self.compiler(self.usual[0]).graph, self.hardware, self.wishes.options)
            split, _ = self.parts
            able = (n for n in counts if all(p.has_room(draft, self.usual[0] / n) for p in split))
            fewest = next(able, counts[-1])
            self.usual, self.last_resort = [fewest], [n for n in counts if n > fewest]

    @cached_property
    def parts(self) -> tuple[list[GraphPass], bool]:
        """The passes that make parts of what is large for a device, and whether nothing fits without them."""
        draft = Draft(self.compiler(self.usual[0]).graph, self.hardware, self.wishes.options)
        kinds = [kind for kind in PASSES.values() if issubclass(kind, GraphPass)]
        split = [p for kind in kinds if (p := kind()).divides(draft)]
        return split, any(p.must_divide(draft) for p in split)

    def scout(self) -> None:
        """Try scouts with the first number of micro-batches; if nothing fits, with other numbers until one does, unless
        DRAM is too small, whatever the number. Where experts must be in parts, each part alone has the size that suits
        a device, so that the fewest stages, which have several parts, come last."""
        counts = self.promising()
        for count in (*counts, *(m for m in (*self.usual, *self.last_resort) if m not in counts)):
            if self.best is None and (count in counts or not self.lacks_host_memory):
                found = scouts(self.compiler(count).lane(self.base), self.base)
                self.look(count, [*found[1:], found[0]] if self.parts[1] else found)

    def more_micro_batches(self) -> None:
        """Try the best candidate with more micro-batches, as long as that gains."""
        for count in self.promising():
            if self.best is not None and count > self.best.count:
                before_s = self.best.step_s
                self.look(count, [self.best_candidate])
                if self.best.step_s > (1 - GAIN) * before_s:
                    return

    def promising(self) -> list[int]:
        """Numbers of micro-batches to try; of a large model, whose graphs take long, only one."""
        return self.usual[:1] if self.is_large(self.usual[0]) else self.usual

    def sweep(self, count: int) -> None:
        """Make all moves with `count` micro-batches. Where the base has a layout of several lanes, candidates have it,
        too."""
        self.look(count, proposals(Position(self, count, self.base)))


def attempt_smallest(trace: Trace, hardware: Hardware, wishes: Wishes) -> CompiledCandidate | PenstockError:
    """Try the candidates of `search` that need the least memory on devices: small micro-batches, many stages, and, for
    models that are not large, stages of single operators. Few micro-batches are tried as well where the model is large,
    as gradients that are not added up take less."""
    usual, last_resort = micro_batch_counts(wishes.batch_size, hardware)
    is_large = len(trace(wishes.micro_batches or usual[0]).nodes) > LARGE_GRAPH_NODES
    most = max(usual + last_resort)
    counts = dict.fromkeys([usual[0], most] if is_large else [most])
    sweep = Sweep(trace, hardware, dataclasses.replace(wishes, decided=None))
    for count in counts if wishes.micro_batches is None else [wishes.micro_batches]:
        sweep.look(count, _smallest_of(sweep, count, is_large))
        if sweep.best is not None or sweep.lacks_host_memory:
            break
    return sweep.best or smallest_step(errors_of(sweep.trials), max(d.memory_bytes for d in hardware.devices))


def _smallest_of(sweep: Sweep, count: int, is_large: bool) -> Iterator[Candidate]:
    """The candidates of `attempt_smallest`, until one fits."""
    if sweep.wishes.asked is not None:
        yield sweep.wishes.asked
        return
    # The bases that need the least memory: those with tiles, and the last two, which have all that is large in parts;
    # of machines without SSDs one of these keeps activations on the device, the other moves them.
    bases = sweep.bases()
    for base in dict.fromkeys([*(base for base in bases if TILES in base.graph_passes), *bases[-2:]]):
        if sweep.best is not None:
            break
        lane = sweep.compiler(count).lane(base)
        found = scouts(lane, base)
        is_long = len(lane.blocks) > MANY_BLOCKS
        if is_long:
            yield found[0]
        if sweep.best is None and not (is_long and sweep.lacks_host_memory):
            yield found[-1]
        cut = found[-1].find(PartitionBalanced)
        if sweep.best is None and not is_large and cut is not None and cut.together:
            yield base.with_(dataclasses.replace(cut, together=False))  # devices share the parts of a layer
    if sweep.best is None and not is_large:
        yield Candidate.parse("ftpipe", sweep.hardware.num_devices)


def _drop_divisions(base: Candidate, tables: bool) -> Candidate:
    """A candidate without the passes that divide layers; nor, with `tables`, those that divide these."""
    own: tuple[type[GraphPass], ...] = (SplitExperts, SplitLinear, SplitContext)
    own = (*own, SplitVocabulary) if tables else own
    return base.with_graph_passes(*(p for p in base.graph_passes if not isinstance(p, own)))
