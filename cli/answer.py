"""What `penstock plan` answers in ten lines: does it fit, how fast, for how long, for how much, what would be better.

Alternatives are planned with the chosen pipeline of passes alone, or in seconds: an even better plan may exist.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from ..compiler.job.job import Job
from ..compiler.report.explain import device_name
from ..compiler.report.tiers import activations_tier, states_tier, weights_tier
from ..compiler.report.wear import wear_of
from ..ir.errors import PenstockError, PlanError
from ..ir.machine.hardware import Hardware
from ..ir.units import format_bytes, format_seconds
from .compare import price
from .options import JobOptions, natural_precision
from .tables import short_tier

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
LABEL = 12  # characters before a line's text
MORE_DRAM = 2
SHORT_SEARCH_S = 3.0  # of computation, for what other passes may suit better
SECONDS_AN_HOUR = 3600.0


def parse_tokens(text: str) -> float:
    """ "100M" and "2.5B" as numbers. Raises `PlanError` for another form."""
    plain = text.strip().lower().replace("_", "").replace(",", "")
    number, unit = (plain[:-1], plain[-1]) if plain and plain[-1].isalpha() else (plain, "")
    try:
        found = float(number) * UNITS[unit]
    except (ValueError, KeyError):
        found = 0.0
    if not found > 0:
        raise PlanError(f"--tokens {text!r}: allowed is a number of tokens, such as 100M, 2.5B or 300000")
    return found


@dataclass(frozen=True)
class Alternative:
    """Another wish for the same model: its tokens a second, or why it does not work."""

    name: str
    tokens_per_s: float | None
    reason: str = ""


def tokens_per_s(job: Job, options: JobOptions) -> float:
    return options.batch * options.sequence / job.simulate().step_s


def alternatives(options: JobOptions, job: Job, hardware: Hardware) -> Iterator[Alternative]:
    """What people try next, one after the other."""
    plan = job.plan
    same = {"strategy": plan.passes, "micro_batches": plan.micro_batches, "plan": None}
    wishes: list[tuple[str, dict[str, object], Hardware]] = []
    usual = natural_precision(hardware)
    if plan.precision == "fp32" != usual:
        wishes.append((usual, {**same, "precision": usual}, hardware))
    larger = {**same, "batch": 2 * options.batch, "micro_batches": 2 * plan.micro_batches}
    wishes.append((f"a batch of {2 * options.batch}", larger, hardware))
    dram = MORE_DRAM * max(host.dram_bytes for host in hardware.hosts)
    anew = {"strategy": "auto", "search_seconds": SHORT_SEARCH_S, "micro_batches": plan.micro_batches, "plan": None}
    wishes.append((f"{format_bytes(dram)} of DRAM", anew, hardware.with_(dram=dram)))
    if options.adapter is None and options.named_model().head == "causal-lm":
        wishes.append(("LoRA, r=16", {**anew, "adapter": "lora:r=16"}, hardware))
    for name, changes, machine in wishes:
        try:
            wish = dataclasses.replace(options, **changes)  # type: ignore[arg-type]
            found = tokens_per_s(wish.compile(hardware=machine), wish)
            # The plan at hand is also one for a machine with more DRAM.
            yield Alternative(name, found if machine is hardware else max(found, tokens_per_s(job, options)))
        except PenstockError as error:
            yield Alternative(name, None, " ".join(str(error).split())[:60])


def answer(
    options: JobOptions, job: Job, tokens: float | None, price_per_hour: float | None, others: list[Alternative]
) -> list[str]:
    """The answer, a line each."""
    plan, hardware = job.plan, job.hardware
    predicted = plan.predicted
    assert predicted is not None
    rate = tokens_per_s(job, options)
    lines = [
        f"{options.model} on {hardware.name}: {options.batch} rows of {options.sequence} tokens, {plan.precision}, "
        f"plan {plan.hash}",
        _line("fits", "yes: " + "; ".join(_peaks(job))),
        _line("speed", f"{_figure(rate)} tokens a second, a step of {format_seconds(predicted.step_s)}"),
        _line("bound by", f"{predicted.bottleneck}; {_gain(job)}"),
        _line("plan", _stages(job)),
    ]
    if tokens is not None:
        lines.append(_line(f"{_short(tokens)} tokens", _duration(job, rate, tokens)))
    lines.append(_line("cost", _cost(hardware, rate, tokens, price_per_hour)))
    ordered = sorted(others, key=lambda other: -(other.tokens_per_s or 0.0))
    for number, other in enumerate(ordered):
        text = (
            f"{other.name:18} {other.reason}"
            if other.tokens_per_s is None
            else f"{other.name:18} {_figure(other.tokens_per_s)} tokens a second, {other.tokens_per_s / rate:.2f} times"
        )
        lines.append(_line("instead" if number == 0 else "", text))
    return [*lines, _line("more", "--full: stages, links, rivals; --html FILE: all of it as a page")]


def _line(label: str, text: str) -> str:
    return f"{label:{LABEL}}{text}"


def _peaks(job: Job) -> Iterator[str]:
    """Peaks against budgets; devices with equal figures share one."""
    predicted = job.plan.predicted
    assert predicted is not None
    alike: dict[str, list[str]] = {}
    for memory, peak in predicted.peak_bytes.items():
        budget = predicted.budget_bytes[memory]
        alike.setdefault(f"{format_bytes(peak)} of {format_bytes(budget)} ({peak / budget:.0%})", []).append(memory)
    for text, names in alike.items():
        yield f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} {text}"


def _gain(job: Job) -> str:
    predicted = job.plan.predicted
    assert predicted is not None
    if not predicted.bound_s:
        return "no bound is known"
    left = max(0.0, 1 - predicted.bound_s / (predicted.from_rest_s or predicted.step_s))
    return f"at most {left:.0%} could still be gained on this machine"


def _stages(job: Job) -> str:
    """Stages folded: how many, where, and the tiers that they use."""
    decisions = job.plan.decisions
    mesh, names = decisions.mesh, list(job.folder.interface.stages)
    devices = dict.fromkeys(device_name(job.hardware, device, mesh) for device in decisions.devices)
    where = " ".join(devices) if len(devices) <= 4 else f"{next(iter(devices))} and {len(devices) - 1} more"
    lanes = f"{mesh.describe()}, " if mesh is not None and len(mesh.lanes) > 1 else ""
    parts = [f"{lanes}{len(names)} stages on {where}, {job.plan.micro_batches} micro-batches"]
    for what, tier in (
        ("weights", lambda name: short_tier(weights_tier(decisions, name))),
        ("states", lambda name: states_tier(decisions, name) or "none"),
        ("activations", lambda name: activations_tier(decisions, name).partition(" but ")[0]),
    ):
        tiers = dict.fromkeys(tier(name) for name in names)
        parts.append(f"{what} {' or '.join(tiers)}")
    return "; ".join(parts)


def _duration(job: Job, rate: float, tokens: float) -> str:
    predicted = job.plan.predicted
    assert predicted is not None
    seconds = tokens / rate
    parts = [f"{seconds / SECONDS_AN_HOUR:,.1f} hours" if seconds >= 360 else format_seconds(seconds)]
    for wear in wear_of(predicted, job.hardware):
        written = wear.written_bytes * seconds / wear.step_s
        life = f", {written / wear.endurance_bytes:.1%} of their life" if wear.endurance_bytes else ""
        parts.append(f"{written / 1e12:,.1f} TB written to {wear.memory}{life}")
    return "; ".join(parts)


def _cost(hardware: Hardware, rate: float, tokens: float | None, per_hour: float | None) -> str:
    buy, rent = price(hardware)
    rent = per_hour if per_hour is not None else rent
    if rent is None and buy is None:
        return "no price is known: --price DOLLARS_AN_HOUR"
    if rent is None:
        return f"{buy:,.0f} $ to buy"
    each = rent / SECONDS_AN_HOUR / rate
    total = f", {each * tokens:,.2f} $ for {_short(tokens)} tokens" if tokens is not None else ""
    return f"{rent:g} $ an hour, {each * 1e6:.3g} $ a million tokens{total}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _short(tokens: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= size:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:g}"


def print_answer(screen: Console, lines: list[str]) -> None:
    """Lines that are too long go on below their text."""
    import textwrap

    for line in lines:
        for part in textwrap.wrap(line, screen.width, subsequent_indent=" " * LABEL, break_long_words=False) or [""]:
            screen.print(part, soft_wrap=True)
