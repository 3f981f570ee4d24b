"""From (graph, hardware, wishes) to the plan that the simulator likes best, with the rivals and why they lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..passes.base import Draft, Options, Pass
from ..passes.coarsen import Coarsen
from ..passes.opgraph import OpGraph
from ..passes.partition_balanced import PartitionBalanced
from ..passes.schedule_pipeline import evaluation_programs
from ..runtime.errors import DoesNotFit, PassError, PenstockError, PlanError, VerifyError
from ..runtime.hardware import Hardware
from ..runtime.memory import profile_memory
from ..runtime.program import Program
from ..runtime.simulate import simulate
from ..runtime.timeline import Timeline
from ..runtime.units import format_seconds
from ..runtime.verify import verify
from .fit import check_fit
from .plan import Decisions, Plan, Prediction, Rival
from .strategies import PIPELINE, PassRecord, parse_pipeline, pipeline_text, require_complete, run_passes

Trace = Callable[[int], OpGraph]  # number of micro-batches -> op graph of one micro-batch
FEW_BLOCKS = 32  # up to this many, or eight a device, stages of every size are worth a try
PassRun = tuple[dict[str, Any], list[PassRecord]]  # decisions and records
NOTHING_DONE: PassRun = ({}, [])
LARGE_GRAPH_NODES = 2000  # above this the sweep keeps to one number of micro-batches: each needs a trace of its own


@dataclass
class Candidate:
    """One complete, verified compilation."""

    name: str
    draft: Draft
    passes: list[Pass]
    decisions: dict[str, Any]
    records: list[PassRecord]
    evaluation: list[Program]
    timeline: Timeline


@dataclass
class Wishes:
    """What the user fixed. None or "auto" leaves it to the search."""

    strategy: str
    micro_batches: int | None
    batch_size: int
    options: Options
    dump: Callable[[str, Draft], None] | None = None
    decided: Plan | None = None


@dataclass
class Miss:
    """A candidate that could not be compiled: a memory is too small, or a pass refused."""

    name: str
    error: PenstockError


@dataclass
class Found:
    """What the search chose, and what it beat."""

    best: Candidate
    rivals: list[Rival] = field(default_factory=list)


def search(trace: Trace, hardware: Hardware, wishes: Wishes) -> Found:
    """Try every candidate and keep the fastest simulated one; the first of equals.

    Raises `DoesNotFit` with the nearest miss if none fits.
    """
    best: Candidate | None = None
    slower: list[tuple[str, float]] = []
    misses: list[Miss] = []
    for tried in attempts(trace, hardware, wishes):
        if isinstance(tried, Miss):
            misses.append(tried)
        elif best is None:
            best = tried
        else:
            loser = tried
            if tried.timeline.step_s < best.timeline.step_s:
                best, loser = tried, best
            slower.append((loser.name, loser.timeline.step_s))
    if best is None:
        raise _nearest(misses)
    rivals = [_slower(name, step_s, best.timeline.step_s) for name, step_s in slower]
    return Found(best, rivals + [Rival(name=m.name, reason=str(m.error).split("\n")[0]) for m in misses])


def _slower(name: str, step_s: float, best_s: float) -> Rival:
    reason = f"{step_s / best_s - 1:.1%} slower ({format_seconds(step_s)})"
    return Rival(name=name, step_s=step_s, reason=reason if step_s > best_s else "as fast, tried later")


def attempts(trace: Trace, hardware: Hardware, wishes: Wishes) -> Iterator[Candidate | Miss]:
    """Compile candidates one by one; numbers of micro-batches that promise less only where none of the others fits."""
    usual, last_resort = micro_batch_counts(wishes.batch_size, hardware)
    if wishes.micro_batches is not None:
        usual, last_resort = [wishes.micro_batches], []
    fits = large = False
    for i, count in enumerate((*usual, *last_resort)):
        if large or (fits and i >= len(usual)):
            return
        graph = trace(count)
        large = len(graph.nodes) > LARGE_GRAPH_NODES
        for start in _candidates(graph, count, hardware, wishes):
            tried = _attempt(*start, wishes)
            fits = fits or isinstance(tried, Candidate)
            yield tried


def attempt_smallest(trace: Trace, hardware: Hardware, wishes: Wishes) -> Candidate | Miss:
    """Of what `attempts` would try, what needs the least memory on devices: small micro-batches, many stages."""
    usual, last_resort = micro_batch_counts(wishes.batch_size, hardware)
    count = wishes.micro_batches or usual[0]
    if wishes.micro_batches is None and len(trace(count).nodes) <= LARGE_GRAPH_NODES:
        count = max(usual + last_resort)
    *_, start = _candidates(trace(count), count, hardware, wishes)
    return _attempt(*start, wishes)


def _attempt(name: str, passes: list[Pass], draft: Draft, done: PassRun, wishes: Wishes) -> Candidate | Miss:
    try:
        return compile_candidate(name, draft, passes, wishes, done)
    except (DoesNotFit, PassError) as error:
        return Miss(name, error)


def compile_candidate(
    name: str, draft: Draft, passes: Sequence[Pass], wishes: Wishes, done: PassRun = NOTHING_DONE
) -> Candidate:
    """Run the passes behind those already `done`, prove the programs and simulate them.

    Raises `DoesNotFit` where a memory is too small.
    """
    decided = wishes.decided.decisions.model_dump() if wishes.decided else None
    todo = [p for p in passes if p.gather(done[0]) is None]
    decisions, records = run_passes(draft, todo, decided, dump=wishes.dump, record=wishes.dump is not None)
    decisions, records = {**done[0], **decisions}, [*done[1], *records]
    check_fit(draft)
    _verify_memory(draft)
    evaluation = evaluation_programs(draft, decisions["fetch"]) if draft.graph.eval_error is None else []
    timeline = simulate(draft.programs, draft.hardware, precision=draft.options.precision)
    return Candidate(name, draft, list(passes), decisions, records, evaluation, timeline)


def _verify_memory(draft: Draft) -> None:
    """Every budget holds in issue order (`check_fit`); here also that no device waits for ever for memory."""
    try:
        verify(draft.programs, draft.hardware)
    except VerifyError as error:
        raise DoesNotFit(f"memories are so tight that devices would wait for each other for ever: {error}") from error


def make_plan(found: Found, model: str, strategy: str) -> Plan:
    """The chosen candidate as a document."""
    best = found.best
    return Plan(
        model=model,
        hardware=best.draft.hardware.name,
        strategy=strategy,
        passes=pipeline_text(best.passes),
        micro_batches=best.draft.options.micro_batches,
        precision=best.draft.options.precision,  # type: ignore[arg-type]
        max_grad_norm=best.draft.options.max_grad_norm,
        decisions=Decisions(**best.decisions),
        predicted=predict(best.draft, best.timeline),
        rivals=found.rivals,
        notes=dict(best.draft.notes),
    )


def predict(draft: Draft, timeline: Timeline) -> Prediction:
    hardware = draft.hardware
    name, share = timeline.bottleneck()
    return Prediction(
        step_s=timeline.step_s,
        peak_bytes=dict(timeline.peak_bytes),
        budget_bytes={memory: hardware.budget_bytes(memory) for memory in timeline.peak_bytes},
        moved_bytes={link: moved for link, moved in timeline.moved_bytes.items() if moved},
        busy={
            f"{hardware.devices[d].name} {stream}": share for (d, stream), share in timeline.busy_share.items() if share
        },
        bottleneck=f"{name}, busy {share:.0%}",
        arena_bytes=[profile_memory(program).arena_bytes for program in draft.programs],
    )


def _candidates(
    graph: OpGraph, count: int, hardware: Hardware, wishes: Wishes
) -> Iterator[tuple[str, list[Pass], Draft, PassRun]]:
    """Name, pipeline, draft and what is done in it of every candidate with this number of micro-batches."""
    options = dataclasses.replace(wishes.options, micro_batches=count)
    base = Draft(graph, hardware, options)
    if wishes.strategy != "auto" or wishes.decided:
        text = wishes.decided.passes if wishes.decided else wishes.strategy
        passes = parse_pipeline(text, hardware.num_devices)
        require_complete(passes)
        yield f"{wishes.strategy}, {count} micro-batches", passes, base, NOTHING_DONE
        return
    coarsened = run_passes(base, [Coarsen()])
    for stages in stage_counts(base):
        line = PIPELINE.replace("partition-balanced", f"partition-balanced{{stages={stages}}}")
        draft = Draft(graph, hardware, options, blocks=base.blocks, notes=dict(base.notes))
        yield f"{stages} stages, {count} micro-batches", parse_pipeline(line, hardware.num_devices), draft, coarsened


def micro_batch_counts(batch_size: int, hardware: Hardware) -> tuple[list[int], list[int]]:
    """Divisors of the batch: as many as devices first (Mobius 3.1: M = N), then up to four times as many; and those
    beyond, whose smaller micro-batches may fit where none of these does."""
    devices = hardware.num_devices
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    near = min(divisors, key=lambda m: (abs(m - devices), m))
    usual = [near, *(m for m in divisors if m != near and devices < m <= 4 * devices)]
    return usual, [m for m in divisors if m > max(usual)]


def stage_counts(draft: Draft) -> list[int]:
    """The fewest stages that fit and one block a stage; of small models also what lies between.

    The smaller the stages, the less of the first fetch and the last offload has nothing to hide under.
    """
    devices, blocks = draft.hardware.num_devices, len(draft.blocks)
    try:
        fewest = len(PartitionBalanced().plan(draft)["stages"])
    except DoesNotFit:
        fewest = blocks
    counts = [fewest, blocks]
    if blocks <= max(FEW_BLOCKS, 8 * devices):  # else each candidate takes seconds
        counts += [*(fewest + k * devices for k in range(1, 4)), 2 * fewest, 4 * fewest]
    return sorted({n for n in counts if n <= blocks})


def _nearest(misses: list[Miss]) -> PenstockError:
    """The miss by the fewest bytes, or the first one that is not about memory."""
    if not misses:
        return PlanError("no candidate could be built for this model and hardware")
    short = [miss.error for miss in misses if isinstance(miss.error, DoesNotFit)]
    return min(short, key=lambda error: error.missing_bytes or 1 << 62) if short else misses[0].error
