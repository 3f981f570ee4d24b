"""A comparison of machines: one model is planned on each of several machines, and each gives a row.

Tokens per second are the rows of a batch times the tokens in a row over the simulated step. A machine with a purchase
price gets tokens per second for each 1000 dollars of it; one with a rent gets tokens for each dollar of rent. If a
host names neither, both stay blank: prices are not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from ..compiler.job.job import Job
from ..compiler.plan import Plan
from ..compiler.report.answer import many
from ..ir.errors import DoesNotFit, HardwareError
from ..ir.machine.hardware import Hardware
from ..ir.units import figure, format_bytes, format_seconds
from .options import JobOptions
from .tables import table

PRICE_UNIT_DOLLARS = 1000.0
SECONDS_AN_HOUR = 3600.0


@dataclass(frozen=True)
class MachineRow:
    """One machine. `reason` says why the model does not fit, with the nearest that does; then all figures are None."""

    machine: str
    fits: bool
    reason: str = ""
    passes: str = ""
    num_stages: int | None = None
    micro_batches: int | None = None
    step_s: float | None = None
    tokens_per_s: float | None = None
    price_dollars: float | None = None
    price_dollars_per_hour: float | None = None
    tokens_per_s_per_1000_dollars: float | None = None
    tokens_per_dollar_of_rent: float | None = None
    bottleneck: str = ""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    budget_bytes: dict[str, int] = field(default_factory=dict)
    nearest: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_machines(options: JobOptions) -> list[tuple[MachineRow, Job | None]]:
    """For each `--hardware`, in order, its row and its job, where the model fits. Raises an error of the model or of a
    hardware document itself."""
    found: list[tuple[MachineRow, Job | None]] = []
    for hardware in options.machines():
        try:
            job = options.compile(hardware=hardware)
            count, item = options.named_model().items(options.batch, options.sequence)
            found.append((fitting_row(hardware, job.plan, count if item == "token" else None), job))
        except (DoesNotFit, HardwareError) as error:  # `HardwareError` if a GPU lacks the precision
            found.append((failing_row(hardware, error), None))
    return found


def fitting_row(hardware: Hardware, plan: Plan, tokens: int | None) -> MachineRow:
    """The row of a machine that the model fits. `tokens` is their number in one step, that is in the global batch; None
    for a model that takes none."""
    assert plan.predicted is not None
    rate = None if tokens is None else tokens / plan.predicted.step_s
    buy, rent = price(hardware)
    return MachineRow(
        machine=hardware.name,
        fits=True,
        passes=plan.passes,
        num_stages=len(plan.decisions.stages),
        micro_batches=plan.micro_batches,
        step_s=plan.predicted.step_s,
        tokens_per_s=rate,
        price_dollars=buy,
        price_dollars_per_hour=rent,
        tokens_per_s_per_1000_dollars=rate / buy * PRICE_UNIT_DOLLARS if rate and buy else None,
        tokens_per_dollar_of_rent=rate * SECONDS_AN_HOUR / rent if rate and rent else None,
        bottleneck=plan.predicted.bottleneck,
        peak_bytes=plan.predicted.peak_bytes,
        budget_bytes=plan.predicted.budget_bytes,
    )


def failing_row(hardware: Hardware, error: DoesNotFit | HardwareError) -> MachineRow:
    buy, rent = price(hardware)
    nearest = dict(error.nearest) if isinstance(error, DoesNotFit) else {}
    reason = " ".join(str(error).split())
    return MachineRow(hardware.name, False, reason, price_dollars=buy, price_dollars_per_hour=rent, nearest=nearest)


def price(hardware: Hardware) -> tuple[float | None, float | None]:
    """Dollars to buy all hosts, and to rent them for an hour; None if any host does not say."""
    buy = [host.price_dollars for host in hardware.hosts]
    rent = [host.price_dollars_per_hour for host in hardware.hosts]
    return _total(buy), _total(rent)


def _total(prices: Iterable[float | None]) -> float | None:
    known = list(prices)
    return None if None in known else sum(p for p in known if p is not None)


def compare_tables(rows: Sequence[MachineRow]) -> list[Table]:
    """Tables of all machines: steps and prices, peaks of memories, plans, and reasons why the model does not fit."""
    money = ("price", "tokens/s per 1000 $", "tokens per $ of rent")
    columns = ("machine", "fits", "step", "tokens/s", *money)
    found = [table("the same model on each machine", columns, [_cells(row) for row in rows])]
    peaks = [(row.machine, _memories(row)) for row in rows if row.fits]
    if peaks:
        found.append(table("peak of each memory", ("machine", "of what may be used"), peaks))
        plans = [(row.machine, _plan_text(row), row.bottleneck) for row in rows if row.fits]
        found.append(table("plans", ("machine", "plan", "bound by"), plans))
    misses = [(row.machine, row.reason) for row in rows if not row.fits]
    if misses:
        found.append(table("does not fit", ("machine", "why, and the nearest that fits"), misses))
    return found


def unpriced_text(rows: Sequence[MachineRow]) -> str:
    """A sentence about machines whose price is blank; empty if there are none."""
    names = [row.machine for row in rows if row.price_dollars is None and row.price_dollars_per_hour is None]
    if not names:
        return ""
    return (
        f"no price is known for {', '.join(names)}: `penstock hardware NAME --set price_dollars_per_hour=0.5 --save "
        "NAME.yaml` writes one, for --hardware NAME.yaml"
    )


def _cells(row: MachineRow) -> tuple[str, ...]:
    if row.price_dollars is not None:
        cost = f"{row.price_dollars:,.0f} $"
    else:
        cost = "" if row.price_dollars_per_hour is None else f"{row.price_dollars_per_hour:.2f} $ an hour"
    if not row.fits or row.step_s is None:
        return (row.machine, "no", "", "", cost, "", "")
    figures = (row.tokens_per_s_per_1000_dollars, row.tokens_per_dollar_of_rent)
    return (
        row.machine,
        "yes",
        format_seconds(row.step_s),
        _figure_or_blank(row.tokens_per_s),
        cost,
        *map(_figure_or_blank, figures),
    )


def _figure_or_blank(value: float | None) -> str:
    return "" if value is None else figure(value)


def _plan_text(row: MachineRow) -> str:
    from ..compiler.pipeline import parse_pipeline
    from ..passes.mapping.mapping import Mapping
    from ..passes.partition.partition import Partition
    from ..passes.schedule.schedule import Schedule

    passes = parse_pipeline(row.passes, num_devices=1)  # the text of a plan names no number of devices
    parts = [p.text() for p in passes if isinstance(p, Partition | Mapping | Schedule)]
    counts = f"{many(row.num_stages or 0, 'stage')}, {many(row.micro_batches or 0, 'micro-batch', 'es')}"
    return f"{counts}: {', '.join(parts)}"


def _memories(row: MachineRow) -> str:
    """Peaks and budgets as text; memories with equal figures share one entry."""
    alike: dict[str, list[str]] = {}
    for memory, peak in row.peak_bytes.items():
        budget = row.budget_bytes[memory]
        text = f"{format_bytes(peak)} of {format_bytes(budget)} ({peak / budget:.0%})"
        alike.setdefault(text, []).append(memory)
    return "; ".join(f"{' '.join(names)} {text}" for text, names in alike.items())
