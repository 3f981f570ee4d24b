"""The figures of `penstock plan`'s answer, which are said in words or printed as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..compiler.job.job import Job
from ..compiler.plan import Plan, Savings
from ..compiler.report.failures import FailureReport
from ..compiler.report.wear import wear_of
from .compare import SECONDS_AN_HOUR, price
from .options import JobOptions


@dataclass(frozen=True)
class Alternative:
    """Another wish for the same model: the options that say it, and its items a second, or why it does not work."""

    options: str
    items_per_s: float | None
    reason: str = ""


@dataclass(frozen=True)
class SsdWrites:
    """The bytes that a whole training writes to the SSDs of a host, and the share of their life, where it is known."""

    memory: str
    bytes: float
    share_of_life: float | None


@dataclass(frozen=True)
class Figures:
    """`item`: "token" or "image", of which a step takes `items`; `busiest`: a stream or a link, and the share of a step
    in which it is busy; `savings`: the shares of a step that nothing saves more than, None where no bound is known;
    `dollars_an_hour`: None where no rent is known. Of a training of `tokens`, if these were asked for: seconds,
    dollars, and what it writes. `alternatives`: None where they were left out."""

    item: str
    items: int
    items_per_s: float
    step_s: float
    peak_bytes: dict[str, int]
    budget_bytes: dict[str, int]
    busiest: str
    busy_share: float
    savings: Savings | None
    dollars: float | None
    dollars_an_hour: float | None
    dollars_a_million: float | None
    tokens: float | None
    training_s: float | None
    training_dollars: float | None
    written: tuple[SsdWrites, ...]
    alternatives: tuple[Alternative, ...] | None

    def document(self) -> dict[str, Any]:
        """Plain figures, for scripts."""
        return asdict(self)


def items_per_s(plan: Plan, options: JobOptions) -> float:
    """Tokens a second, or images where the model takes these."""
    assert plan.predicted is not None
    return options.items()[0] / plan.predicted.step_s


def figures_of(
    options: JobOptions,
    job: Job,
    tokens: float | None,
    price_per_hour: float | None,
    others: list[Alternative] | None,
    failures: FailureReport | None = None,
) -> Figures:
    """`price_per_hour`: in place of the hardware's; `failures`: by which a training takes longer."""
    predicted, timeline = job.plan.predicted, job.simulate()
    assert predicted is not None
    items, item = options.named_model().items(options.batch, options.sequence)
    rate = items_per_s(job.plan, options)
    busiest, busy_share = timeline.bottleneck()
    buy, rent = price(job.hardware)
    rent = price_per_hour if price_per_hour is not None else rent
    each = None if rent is None else rent / SECONDS_AN_HOUR / rate
    useful_share = 1.0 if failures is None else failures.useful_share
    training_s = None if tokens is None else tokens / (rate * useful_share)
    return Figures(
        item,
        items,
        rate,
        predicted.step_s,
        predicted.peak_bytes,
        predicted.budget_bytes,
        busiest,
        busy_share,
        predicted.savings,
        buy,
        rent,
        None if each is None else each * 1e6,
        tokens,
        training_s,
        each * tokens if each is not None and tokens is not None else None,
        () if training_s is None else tuple(_ssd_writes(job, training_s)),
        None if others is None else tuple(others),
    )


def _ssd_writes(job: Job, seconds: float) -> list[SsdWrites]:
    predicted = job.plan.predicted
    assert predicted is not None
    rows = [(wear, wear.written_bytes * seconds / wear.step_s) for wear in wear_of(predicted, job.hardware)]
    return [SsdWrites(w.memory, n, n / w.endurance_bytes if w.endurance_bytes else None) for w, n in rows]
