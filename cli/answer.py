"""The answer of `penstock plan`, in ten lines: does it fit, how fast, for how long, for how much, what would be better.

Alternatives begin from the chosen pipeline of passes, beside a search of seconds: an even better plan may exist.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from ..compiler.job.job import Job
from ..compiler.models.named import NamedModel
from ..compiler.plan import Plan
from ..compiler.report.answer import answer_lines, line, many, wrap_lines
from ..compiler.report.failures import FailureReport, failure_text
from ..compiler.search.candidate import Candidate
from ..compiler.search.trial import Trial
from ..ir.errors import DoesNotFit, PenstockError, PlanError
from ..ir.machine.hardware import Hardware
from ..ir.units import figure, spell_bytes, time_text
from ..passes.partition_mip.partition_mip import PartitionMip
from .figures import Alternative, Figures, SsdWrites, items_per_s
from .options import JobOptions, PlanOptions, natural_precision, with_ssds

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
MORE_DRAM = 2
LORA, SSD = "lora:r=16", "2TB"
SHORT_S = 3.0  # of computation, for what other passes may suit better
FASTER = 1.05  # times; less is no advice
MANY_STAGES = 400  # above which each alternative takes as long as the plan itself
LESS_WEAR = "--dram with more, or --adapter, writes less; --set ssds=N spreads it over N disks"


def parse_tokens(text: str) -> float:
    """ "100M" and "2.5B" as numbers. Raises `PlanError` for another form."""
    plain = text.strip().lower().replace("_", "").replace(",", "")
    number, unit = (plain[:-1], plain[-1]) if plain and plain[-1].isalpha() else (plain, "")
    try:
        found = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        found = 0.0
    if not 0 < found < math.inf:
        raise PlanError(f"--tokens {text!r}: allowed is a number of tokens, such as 100M, 2.5B or 300000")
    return found


def require_tokens(options: JobOptions) -> None:
    """Raise `PlanError` for a model that takes no tokens."""
    _, item = options.items()
    if item != "token":
        raise PlanError(f"--tokens: {options.model} takes {item}s; leave it out")


@dataclass(frozen=True)
class _Wish:
    """Other options for the same model: the best of several `ways` counts."""

    text: str
    ways: tuple[dict[str, object], ...]
    hardware: Hardware


def alternatives(options: JobOptions, job: Job, tell: Callable[[str], None]) -> tuple[list[Alternative], Job]:
    """The alternatives that people try next, and the plan at hand, which is another one where the passes that suit more
    DRAM are faster on the machine as it is, too. `tell` hears of each before it is planned."""
    named, hardware, anew = options.named_model(), job.hardware, _anew(options)
    dram = MORE_DRAM * max(host.dram_bytes for host in hardware.hosts)
    wish = _Wish(f"--dram {spell_bytes(dram)}", (_same(job.plan), anew), hardware.with_(dram=dram))
    tell(f"with {wish.text}")
    with_dram, better = _try(wish, options)
    job = _faster_here(job, better, options)
    least = items_per_s(job.plan, options)  # which the plan at hand makes there, too
    found = [dataclasses.replace(with_dram, items_per_s=max(least, with_dram.items_per_s or 0.0), reason="")]
    same, larger = _same(job.plan), {"batch": 2 * options.batch}
    wishes = _other_precision(same, options, hardware)
    twice = {**same, **larger, "micro_batches": 2 * job.plan.micro_batches}
    wishes.append(_Wish(f"--batch {2 * options.batch}", (twice, {**anew, **larger}), hardware))
    wishes += _adapter(anew, options, named, hardware)
    return [*found, *_plan_all(wishes, options, tell)], job


def why_left_out(options: JobOptions, num_stages: int) -> str | None:
    """The reason why alternatives are planned only if they are asked for; None where they take seconds."""
    if options.profile:
        return "not tried, as the blocks of each would be timed, too"
    return f"not tried, as a plan of more than {MANY_STAGES} stages takes a while" if num_stages > MANY_STAGES else None


def what_fits(options: JobOptions, tell: Callable[[str], None]) -> list[Alternative]:
    """Changes that may make a model fit, besides more memory."""
    named, hardware, anew = options.named_model(), options.machine(), _anew(options)
    wishes = _other_precision(anew, options, hardware)
    if not all(host.ssds for host in hardware.hosts):
        wishes.append(_Wish(f"--ssd {SSD}", (anew,), with_ssds(hardware, SSD)))
    return _plan_all([*wishes, *_adapter(anew, options, named, hardware)], options, tell)


def _anew(options: JobOptions) -> dict[str, object]:
    """The changes for a search that is no longer than what was asked for."""
    asked = options.search_seconds
    return {"search_seconds": SHORT_S if asked is None else min(SHORT_S, asked), "plan": None}


def _same(plan: Plan) -> dict[str, object]:
    """The changes for the pipeline of a plan."""
    return {"strategy": plan.passes, "micro_batches": plan.micro_batches, "plan": None}


def _faster_here(job: Job, other: Plan | None, options: JobOptions) -> Job:
    """The job with the passes of `other`, which are for another machine, where they are faster here and the search may
    choose; else the job itself."""
    if other is None or options.strategy != "auto" or other.passes == job.plan.passes:
        return job
    try:
        found = dataclasses.replace(options, **_same(other)).compile(hardware=job.hardware)  # type: ignore[arg-type]
    except DoesNotFit:
        return job
    if items_per_s(found.plan, options) <= items_per_s(job.plan, options):
        return job
    assert found.plan.predicted is not None and job.plan.predicted is not None
    before = Trial(Candidate.parse(job.plan.passes, job.hardware.num_devices), job.plan.micro_batches)
    before = dataclasses.replace(before, step_s=job.plan.predicted.step_s)
    rivals = [before.rival(found.plan.predicted.step_s), *job.plan.rivals]
    found.folder.plan = found.plan.model_copy(update={"strategy": job.plan.strategy, "rivals": rivals})
    return found


def _other_precision(changes: dict[str, object], options: JobOptions, hardware: Hardware) -> list[_Wish]:
    usual = natural_precision(hardware)
    if options.precision_on(hardware) != "fp32" or usual == "fp32":
        return []
    return [_Wish(f"--precision {usual}", ({**changes, "precision": usual},), hardware)]


def _adapter(changes: dict[str, object], options: JobOptions, named: NamedModel, hardware: Hardware) -> list[_Wish]:
    if options.adapter is not None or named.head != "causal-lm":
        return []
    return [_Wish(f"--adapter {LORA}", ({**changes, "adapter": LORA},), hardware)]


def _plan_all(wishes: Iterable[_Wish], options: JobOptions, tell: Callable[[str], None]) -> list[Alternative]:
    found = []
    for wish in wishes:
        tell(f"with {wish.text}")
        found.append(_try(wish, options)[0])
    return found


def _try(wish: _Wish, options: JobOptions) -> tuple[Alternative, Plan | None]:
    """The alternative that a wish is, and its best plan, if there is one."""
    rates: list[tuple[float, Plan]] = []
    misses: list[PenstockError] = []
    for way in wish.ways:
        chosen = dataclasses.replace(options, **way)  # type: ignore[arg-type]
        try:
            plan = chosen.find_plan(wish.hardware)
            rates.append((items_per_s(plan, chosen), plan))
        except PenstockError as miss:
            misses.append(miss)
    if rates:
        rate, plan = max(rates, key=lambda each: each[0])
        return Alternative(wish.text, rate), plan
    fits_no_way = isinstance(misses[-1], DoesNotFit)
    reason = "does not fit" if fits_no_way else " ".join(str(misses[-1]).split())
    return Alternative(wish.text, None, reason), None


def or_what_fits(miss: DoesNotFit, options: JobOptions, others: list[Alternative]) -> DoesNotFit:
    """The same error, which also names the alternatives that fit."""
    _, item = options.named_model().items(options.batch, options.sequence)
    known = [f"{o.options} ({figure(o.items_per_s)} {item}s a second)" for o in others if o.items_per_s is not None]
    said = f" It also fits with {', or with '.join(known)}." if known else ""
    return DoesNotFit(f"{miss}{said}", memory=miss.memory, missing_bytes=miss.missing_bytes, nearest=miss.nearest)


def answer(options: JobOptions, job: Job, figures: Figures, failures: FailureReport | None = None) -> list[str]:
    """The answer, a line each."""
    plan, item, rate = job.plan, figures.item, figures.items_per_s
    rows = many(figures.items, item)
    if item == "token":
        rows = f"{many(options.batch, 'row')} of {many(options.sequence, item)}"
    stages, busiest = job.folder.interface.stages, (figures.busiest, figures.busy_share)
    lines = [
        f"{options.model} on {job.hardware.name}: {rows}, {plan.precision}, plan {plan.hash}",
        *answer_lines(job.model, plan, job.hardware, stages, (figures.items, item), busiest),
    ]
    if options.named_model().has_vision:
        lines.append(line("rows", "text alone; penstock.compile plans a batch with images from Python"))
    if PartitionMip.name in plan.notes and isinstance(options, PlanOptions) and options.prove:
        lines.append(line("proof", plan.notes[PartitionMip.name]))
    if figures.tokens is not None:
        lines.append(line(f"{_short(figures.tokens)} tokens", _duration(figures)))
        worn = [row for row in figures.written if (row.share_of_life or 0.0) > 1]
        lines += [line("warning", f"{row.memory} ends before that: {_life(row)}; {LESS_WEAR}") for row in worn]
    if failures is not None:
        lines.append(line("failures", failure_text(failures)))
    lines.append(line("cost", _cost(figures)))
    if figures.alternatives is None:
        why = why_left_out(options, len(stages))
        lines.append(line("instead", f"{why}; --alternatives plans a larger batch, more DRAM and others, too"))
    lines += _instead(rate, item, figures.alternatives or ())
    return [*lines, line("more", "--full: stages, links, rivals; --html FILE: all of it as a page")]


def _instead(rate: float, item: str, others: Sequence[Alternative]) -> Iterator[str]:
    """The faster alternatives, the fastest first; then, in one line, the others."""
    speeds = {other.options: other.items_per_s for other in others if other.items_per_s is not None}
    faster = sorted((text for text in speeds if speeds[text] >= FASTER * rate), key=lambda text: -speeds[text])
    width = max(map(len, faster), default=0)
    for number, text in enumerate(faster):
        said = f"{text:{width}}  {figure(speeds[text])} {item}s a second, {speeds[text] / rate:.2f} times the speed"
        yield line("instead" if number == 0 else "", said)
    rest = [text for text in speeds if text not in faster]
    rest += [f"{other.options} ({other.reason})" for other in others if other.reason]
    if rest:
        yield line("no faster", f"{'; '.join(rest)}; by a short search")


def _duration(figures: Figures) -> str:
    assert figures.training_s is not None
    parts = [time_text(figures.training_s)]
    for row in figures.written:
        life = f", {_life(row)}" if row.share_of_life is not None else ""
        parts.append(f"{figure(row.bytes / 1e12)} TB written to {row.memory}{life}")
    return "; ".join(parts)


def _life(row: SsdWrites) -> str:
    return f"{row.share_of_life:.1%} of its life"


def _cost(figures: Figures) -> str:
    if figures.dollars_an_hour is None:
        buy = figures.dollars
        return "no price is known: --price DOLLARS_AN_HOUR" if buy is None else f"{buy:,.0f} $ to buy"
    tokens, total = figures.tokens, figures.training_dollars
    whole = f", {total:,.2f} $ for {_short(tokens)} tokens" if tokens is not None and total is not None else ""
    each = f"{figures.dollars_a_million:.3g} $ a million {figures.item}s"
    return f"{figures.dollars_an_hour:g} $ an hour, {each}{whole}"


def _short(tokens: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def print_answer(screen: Console, lines: list[str]) -> None:
    for text in wrap_lines(lines, screen.width):
        screen.print(text, soft_wrap=True)
