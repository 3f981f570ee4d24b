"""The moves of a sweep: what the search tries with one number of micro-batches, in order.

First come candidates that most often gain, so that bounds rule out many of the others: resident stages, a searched
partition, other tiers. Then come those that may not be left out when time is short: named strategies, every
partitioner, every mapping. Then the best plan is changed by one thing at a time. Passes themselves say in which
variants they are worth a try: those over the op graph early, those over programs last, as the passes after them may
lose what they gain.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ...passes.base import Pass, PlanSoFar
from ...passes.draft import Draft
from ...passes.partition_mip.partition_mip import PartitionMip
from ...passes.rewrite.graph_pass import GraphPass
from ...passes.table import PASSES
from ..strategies import STRATEGIES
from .attempts import Attempts
from .candidate import Candidate
from .candidates import (
    IN_ORDER,
    balanced_partition,
    candidates_with_copies,
    lane_scouts,
    mappings,
    may_copy,
    more_of_mip,
    partitions,
    schedules,
)
from .layouts import LayoutEstimate, estimates
from .trial import Pruned, Skipped, Trial

LEADERS = 3  # partitions whose schedules and tiers are tried
ALIKE = 0.75  # the share of repeated blocks from which those of one kind make the model a chain of these
HOPELESS = 2  # times the best step: a layout so slow is not tried with more micro-batches, which gain less
FAR = 0.1  # by how much the first may be slower than the best: schedules and tiers gain less


@dataclass
class Position:
    """The position of a sweep: the trials so far, its number of micro-batches, and the base of its candidates."""

    attempts: Attempts
    count: int
    base: Candidate

    def __post_init__(self) -> None:
        self.lane = self.attempts.compiler(self.count).lane(self.base)
        self.cuts = list(partitions(self.lane, self.base))
        self.maps = mappings(self.lane.lane_hardware)
        self.usual = [self.base.with_(cut, self.maps[0]) for cut in self.cuts]  # with every partition
        self.named = named_strategies(self.base, self.attempts.hardware.num_devices)

    @property
    def best(self) -> Candidate:
        return self.attempts.best_candidate

    @property
    def best_trial(self) -> Trial:
        return self.attempts.trial_of(self.count, self.best)

    @property
    def leaders(self) -> list[Trial]:
        """The fastest trials so far, each partition with its best mapping; none that is far from the best."""
        leaders: dict[float, Trial] = {}  # one of those that come to the same plan, and so to the same step
        rows = [t for t in self.attempts.fastest_on(self.base.mesh) if t.count == self.count]
        for row in rows:
            far = row.step_s is not None and row.step_s > (1 + FAR) * (rows[0].step_s or 0.0)
            if not far and row.cut not in [leader.cut for leader in leaders.values()]:
                leaders.setdefault(row.step_s or 0.0, row)
        return list(leaders.values())[:LEADERS]

    @property
    def plan_so_far(self) -> PlanSoFar:
        """The best plan as passes see it."""
        attempts, best = self.attempts, self.attempts.best
        start = Draft(attempts.compiler(self.count).graph, attempts.hardware, attempts.wishes.options)
        if best is None or best.count != self.count:
            return PlanSoFar(self.best.passes, start)
        is_short = not self.best_trial.keeps_all
        return PlanSoFar(self.best.passes, start, best.draft, best.decisions, is_short, self.best.is_shared)


def named_strategies(base: Candidate, num_devices: int) -> list[Candidate]:
    """The strategies that train as plain PyTorch does, with the base's passes over the op graph; none with lanes."""
    if base.mesh is not None:
        return []
    over = base.graph_passes
    candidates = [Candidate.parse(name, num_devices) for name in STRATEGIES]
    candidates = [each if each.graph_passes == over else each.with_graph_passes(*over) for each in candidates]
    return [candidate for candidate in candidates if candidate.is_synchronous]


def quick_strategies(base: Candidate, num_devices: int) -> list[Candidate]:
    """The named strategies that take no long search of their own."""
    named = named_strategies(base, num_devices)
    return [c for c in named if not c.is_slow and (c.uses_ssd or not base.uses_ssd)]


def resident_stages(position: Position) -> Iterator[Candidate]:
    """The fastest candidate with stages that stay on devices which cannot hold all of their stages. While that gains,
    the number of stages is halved."""
    for row in position.leaders[:1]:
        if row.swapped and row.candidate.fetches and not row.candidate.is_shared:
            yield row.candidate.with_tiering(resident=True, activations=True)
            yield row.candidate.with_tiering(resident=True, activations=False)
    best, number = position.attempts.best, 0
    while best is not None and best.count == position.count and position.best.keeps_stages:
        number = (number or len(best.draft.stages)) // 2
        if number <= position.attempts.hardware.num_devices:
            return
        before = position.best
        yield before.with_(balanced_partition(number, position.base, position.attempts.hardware))
        if position.best == before:
            return


@dataclass(frozen=True)
class Move:
    """A neighbourhood: its name, whether it applies, and the candidates that it proposes. These may depend on what has
    become of the candidates before them."""

    name: str
    applies: Callable[[Position], bool]
    candidates: Callable[[Position], Iterable[Candidate]]


def proposals(position: Position) -> Iterator[Candidate]:
    """The candidates of all moves, in order."""
    for move in MOVES:
        if move.applies(position):
            yield from move.candidates(position)


def always(position: Position) -> bool:
    return True


def has_unlike_blocks(position: Position) -> bool:
    """Whether blocks differ in kind, as where a model has an encoder and a decoder, towers or experts: there stages of
    no contiguous blocks may win."""
    kinds = Counter(block.hash for block in position.lane.blocks)
    repeated = [count for count in kinds.values() if count > 1]
    alike = position.base.uses_ssd or max(repeated, default=0) > ALIKE * sum(repeated)
    return not alike and position.lane.lane_hardware.num_devices > 1


def other_mappings(position: Position) -> list[Candidate]:
    return [row.candidate.with_(mapping) for mapping in position.maps for row in position.leaders[:1]]


def other_tiers(position: Position, row: Trial) -> Iterator[Candidate]:
    """The candidate with and without activations that move, and an optimizer under the backward pass; of shared stages,
    with all computed again and not. Without SSDs the optimizer comes first, since it gains most; activations then move
    beside the faster one, also with stages cut as for inputs that leave the device."""
    candidate, attempts = row.candidate, position.attempts
    if candidate.is_shared:
        yield from [candidate.with_swap(swap) for swap in (True, False)]
    elif candidate.fetches and attempts.has_ssds:
        both = itertools.product((True, False), (True,) if position.base.uses_ssd else (True, False))
        yield from [candidate.with_tiering(activations=moved, reservoir=lower) for moved, lower in both]
    elif candidate.fetches:
        overlapped = candidate.with_tiering(overlap=True)
        yield overlapped
        faster = overlapped if position.best == overlapped else candidate
        yield from [faster.with_tiering(activations=True), faster.leaving(), faster.with_tiering(activations=False)]


def tiers_of_the_first(position: Position) -> Iterator[Candidate]:
    for row in position.leaders[:1]:
        yield from other_tiers(position, row)


def lanes(position: Position) -> Iterator[Candidate]:
    """For few devices, layouts of several lanes, with another number of micro-batches, too, where by its estimate that
    is faster than the best, unless the layout has shown to be far from it; then all moves with the best layout and its
    number.

    Lanes may need more micro-batches than one pipeline: each has all of the model, and less room for what is saved."""
    attempts, base = position.attempts, position.base
    for row in estimates(position.lane, list(dict.fromkeys([position.count, *attempts.usual]))):
        if row.count == position.count:
            yield from layout_scouts(attempts, row, base)
        elif attempts.best is not None:
            promised_s = max(row.estimate_s, attempts.seen_s(row.mesh) / HOPELESS)
            if promised_s < attempts.best.step_s:
                attempts.look(row.count, layout_scouts(attempts, row, base))
    if attempts.best is None or attempts.best.count == position.count:
        yield from on_best_mesh(attempts, position.count, base)
    else:
        attempts.look(attempts.best.count, on_best_mesh(attempts, attempts.best.count, base))


def layout_scouts(attempts: Attempts, row: LayoutEstimate, base: Candidate) -> Iterator[Candidate]:
    """Scouts of a layout with several lanes; none where its bound or the time left excludes it, which is recorded."""
    candidate, best = base.on(row.mesh), attempts.best
    if best is not None and row.bound_s >= best.step_s:
        attempts.trials.append(Trial(candidate, row.count, reason=Pruned(row.bound_s)))
        return
    reason = attempts.reason_to_end
    if best is not None and row.scout_s > attempts.until_s - attempts.work.seconds:
        reason = Skipped.OUT_OF_TIME
    if reason is not None:
        attempts.trials.append(Trial(candidate, row.count, reason=reason))
        return
    lane = attempts.lane_of(candidate, row.count)
    if lane is None:
        return
    scouts = lane_scouts(lane, candidate, row.mesh)
    yield from scouts
    if row.mesh.shards > 1 and attempts.best is None:  # what is gathered whole must be smaller
        yield scouts[0].with_(IN_ORDER[0]()).with_swap(True)


def on_best_mesh(attempts: Attempts, count: int, base: Candidate) -> Iterator[Candidate]:
    """All moves with the layout of the best candidate, where that has several lanes and the base has one."""
    best = attempts.best_candidate
    if best.mesh is not None and not best.name and base.mesh is None:
        yield from proposals(Position(attempts, count, base.with_graph_passes(*best.graph_passes).on(best.mesh)))


def copied_stages(position: Position) -> Iterator[Candidate]:
    """Candidates of which some stages run on several devices in turn; none where that cannot be, which is recorded."""
    attempts, candidates = position.attempts, candidates_with_copies(position.lane, position.base)
    if may_copy(position.lane, position.base):
        yield from candidates
    elif (position.count, candidates[0]) not in attempts.done:
        attempts.done.add((position.count, candidates[0]))
        attempts.trials.append(Trial(candidates[0], position.count, reason=Skipped.NO_COPIES))


def tiers_of_the_best(position: Position) -> list[Candidate]:
    """The fastest partitions with the tiers of the best candidate."""
    tiers = dataclasses.asdict(position.best.tiering)
    return [row.candidate.with_tiering(**tiers) for row in position.leaders]


def other_schedules(position: Position) -> Iterator[Candidate]:
    for row in position.leaders:
        swaps = (False,) if row.all_swapped and not row.candidate.is_shared else (False, True)
        for schedule, swap in itertools.product(schedules(position.lane.lane_hardware.num_devices), swaps):
            yield row.candidate.with_(schedule).with_swap(swap)


def differs(position: Position) -> bool:
    """Whether the best differs from the base in more than partition and mapping."""
    best = position.best
    usual = best.with_(position.cuts[0], position.maps[0])
    return not best.name and best.mesh == position.base.mesh and usual != position.usual[0]


def like_the_best(position: Position) -> Iterator[Candidate]:
    """Other partitions, mappings and tiers of the best."""
    yield from [position.best.with_(cut) for cut in position.cuts]
    yield from [position.best.with_(mapping) for mapping in position.maps]
    yield position.best
    yield from other_tiers(position, position.best_trial)


def variants(position: Position, kind: type[Pass]) -> list[Candidate]:
    """The best candidate, and other fast partitions where the pass wants that, with each variant of a pass. Where that
    changes the op graph, partition-mip keeps the number of stages: looking through all numbers takes six times as long.
    """
    forms = kind.variants(position.plan_so_far)
    others = [row.candidate for row in position.leaders] if forms and kind.of_leaders else []
    best, found = position.best, position.attempts.best
    if issubclass(kind, GraphPass) and found is not None and isinstance(best.partition, PartitionMip):
        best = best.with_(best.partition.with_stages(len(found.draft.stages)))
    pairs = itertools.product(forms, (best, *others))
    return list(dict.fromkeys(candidate.replace_pass(kind, form) for form, candidate in pairs))


def graph_variants(position: Position) -> Iterator[Candidate]:
    """Variants of passes over the op graph, first of those that are not in every strategy."""
    for kind in sorted(PASSES.values(), key=lambda kind: kind.everywhere):
        if issubclass(kind, GraphPass):
            yield from variants(position, kind)


def refine(position: Position) -> Iterator[Candidate]:
    """One thing of the best exchanged at a time, until nothing gains; variants of passes over programs come last."""
    over_programs = [kind for kind in PASSES.values() if "programs" in kind.needs]
    between = [kind for kind in PASSES.values() if kind not in over_programs and not issubclass(kind, GraphPass)]
    before = None
    while position.attempts.best is not before:
        before = position.attempts.best
        yield from graph_variants(position)
        for kind in between:
            yield from variants(position, kind)
    for kind in over_programs:
        yield from variants(position, kind)


MOVES = (
    Move("resident stages of scouts", always, resident_stages),
    Move("a searched partition", always, lambda p: [c for c in p.usual if isinstance(c.partition, PartitionMip)]),
    Move("tiers of scouts", always, tiers_of_the_first),
    Move("resident stages of searched partitions", always, resident_stages),
    Move("variants of graph passes of scouts", always, graph_variants),
    Move("quick strategies", always, lambda p: quick_strategies(p.base, p.attempts.hardware.num_devices)),
    Move("partitions", always, lambda p: sorted(p.usual, key=lambda candidate: candidate.is_slow)),
    Move("strategies for unlike blocks", has_unlike_blocks, lambda p: p.named),
    Move("mappings", always, other_mappings),
    Move("tiers", always, tiers_of_the_first),
    Move("resident stages", always, resident_stages),
    Move("variants of graph passes", always, graph_variants),
    Move("lanes", lambda p: p.base.mesh is None and p.attempts.hardware.num_devices > 1, lanes),
    Move("copied stages", always, copied_stages),
    Move(
        "numbers of stages",
        lambda p: not p.attempts.is_late and not p.base.is_shared,
        lambda p: [p.base.with_(cut, p.maps[0]) for cut in more_of_mip(p.lane)],
    ),
    Move(
        "tiers of the best",
        lambda p: not p.best.name and not p.best.is_shared and p.best.mesh == p.base.mesh,
        tiers_of_the_best,
    ),
    Move("refine", always, refine),
    Move("strategies", lambda p: not p.base.uses_ssd, lambda p: p.named),
    Move("schedules", always, other_schedules),
    Move("like the best", differs, like_the_best),
    Move("all pairs", always, lambda p: [p.base.with_(cut, mapping) for mapping in p.maps for cut in p.cuts]),
    Move("refine again", always, refine),
    Move("all strategies", always, lambda p: p.named),
)
