"""`penstock predict`: published runs beside simulations of them, each as its system does it and as `auto` would.

Simulations are kept as lines of JSON by what was simulated, so that a command goes on where one before it has ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ..compiler import api
from ..compiler.models.named import find_model
from ..compiler.planning import share, sharing
from ..compiler.strategies import STRATEGIES
from ..ir.errors import DoesNotFit, PlanError
from ..ir.machine.hardware import Hardware
from .published import PublishedRun, Way, read, run_of, way_of
from .report import markdown_table

Cells = Mapping[str, str]
THEIRS, AUTO = "as they do it", "auto"


@dataclass(frozen=True)
class Simulation:
    """A simulated step; without seconds where it does not fit, and then `why`."""

    step_s: float | None
    peak_bytes: int | None = None
    passes: str = ""
    why: str = ""
    cpu_s: float = 0.0


@dataclass(frozen=True)
class Compared:
    """A published run beside its simulations, None where one was not made; `reason`: why the run has none."""

    row: Cells
    run: PublishedRun | None
    reason: str = ""
    theirs: Simulation | None = None
    auto: Simulation | None = None

    @property
    def excess(self) -> float | None:
        """The share by which our step as they do it is longer than theirs."""
        return _excess(getattr(self.theirs, "step_s", None), getattr(self.run, "seconds", None))

    @property
    def auto_excess(self) -> float | None:
        """The share by which the step of the search's plan is longer than theirs."""
        return _excess(getattr(self.auto, "step_s", None), getattr(self.run, "seconds", None))

    @property
    def peak_excess(self) -> float | None:
        """The share by which our peak as they do it is above theirs."""
        return _excess(getattr(self.theirs, "peak_bytes", None), getattr(self.run, "peak_bytes", None))

    @property
    def fits_alike(self) -> bool | None:
        """Whether the run fits in our accounting as it did in theirs."""
        if self.theirs is None or self.run is None:
            return None
        return (self.theirs.step_s is not None) == self.run.fits


def _excess(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs - 1 if ours and theirs else None


def compare(
    table: Path,
    kept: Path | None = None,
    only: str = "",
    best: bool = True,
    until_s: float = float("inf"),
    say: Callable[[str], None] = lambda text: None,
) -> list[Compared]:
    """Every row whose text has `only`, with its simulations: first all as they do it, then `auto` if `best`. None is
    begun after `until_s` seconds. Raises `PlanError` for a table that is none."""
    begun_s = time.monotonic()
    rows = [row for row in read(table) if only in " ".join(row.values())]
    runs = [(row, run_of(row), way_of(row)) for row in rows]
    simulate = Simulations(kept, lambda: time.monotonic() - begun_s < until_s, say)
    found = {how: simulate.all(runs, how) for how in ((THEIRS, AUTO) if best else (THEIRS,))}
    theirs, auto = found[THEIRS], found.get(AUTO, {})
    return [
        Compared(row, None if isinstance(run, str) else run, _reason(run, way), theirs.get(i), auto.get(i))
        for i, (row, run, way) in enumerate(runs)
    ]


def _reason(run: PublishedRun | str, way: Way | None) -> str:
    """The reason why a run has no simulation."""
    if isinstance(run, str):
        return run
    return "no way is stated for its system" if way is None else way.left_out


class Simulations:
    """Simulates runs, or finds them among those that are kept in a file. `goes_on`: whether to begin another."""

    def __init__(self, kept: Path | None, goes_on: Callable[[], bool], say: Callable[[str], None]):
        self.path, self.goes_on, self.say = kept, goes_on, say
        self.known: dict[str, Simulation] = {}
        for number, text in enumerate(kept.read_text().splitlines() if kept and kept.exists() else [], start=1):
            try:
                line = json.loads(text)
                self.known[line["key"]] = Simulation(**line["found"])
            except (ValueError, KeyError, TypeError) as error:
                raise PlanError(
                    f"{kept}:{number}: not a line that this command has written; name another file"
                ) from error

    def all(self, runs: Sequence[tuple[Cells, PublishedRun | str, Way | None]], how: str) -> dict[int, Simulation]:
        """Simulations by the place of the run. Runs of one model come together, as they share its graphs."""
        found: dict[int, Simulation] = {}
        places = [i for i, (_, run, way) in enumerate(runs) if not _reason(run, way)]

        def model_of(place: int) -> tuple[str, ...]:
            return _model_key(*runs[place][1:])

        for _, group in groupby(sorted(places, key=model_of), model_of):
            with sharing():
                for i in group:
                    made = self.one(*runs[i], how)  # type: ignore[arg-type]
                    if made is not None:
                        found[i] = made
        return found

    def one(self, row: Cells, run: PublishedRun, way: Way, how: str) -> Simulation | None:
        strategy = way.pipeline(row["note"]) if how == THEIRS else AUTO
        key = _key(run, way, strategy)
        if key not in self.known and self.goes_on():
            name = ", ".join(row[column] for column in ("system", "model", "n_gpus", "gpu", "batch", "seq"))
            self.say(f"{how}: {name}")
            found = simulate(run, way, strategy)
            self.known[key] = found
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "a") as file:
                    file.write(json.dumps({"key": key, "run": name, "how": how, "found": vars(found)}) + "\n")
        return self.known.get(key)


def _key(run: PublishedRun, way: Way, strategy: str) -> str:
    """Equal for runs that have the same simulation."""
    asked = dataclasses.replace(run, rows=_rows(run, way, strategy), seconds=None, peak_bytes=None, fits=True)
    told = dataclasses.astuple(asked), way.own_types, way.precision, way.optimizer, strategy
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def _rows(run: PublishedRun, way: Way, strategy: str) -> int:
    """The rows of a micro-batch; 0 where the search chooses them."""
    return 0 if strategy == AUTO else run.rows if way.rows is None else way.rows


def _model_key(run: Any, way: Any) -> tuple[str, ...]:
    return run.model, run.adapter or "", run.base or "", str(way.own_types and run.precision)


def simulate(run: PublishedRun, way: Way, strategy: str) -> Simulation:
    """One simulated step. A system's own does not fit where weights would have to be fetched that it keeps."""
    begin_s = time.process_time()
    named = dataclasses.replace(find_model(run.model, adapter=run.adapter, base=run.base, dropout=False), padding=False)
    own_types = way.own_types and run.precision == "bf16-true"
    model = share(_model_key(run, way), lambda: named.describe().bfloat16() if own_types else named.describe())
    rows = _rows(run, way, strategy)
    try:
        plan = api.find_plan(
            model, Hardware.preset(run.hardware, **dict(run.changes)), strategy=strategy,
            example_inputs=named.batch_spec(run.batch, run.sequence),
            micro_batches=max(1, run.batch // rows) if rows else "auto",
            precision="fp32" if own_types else way.precision or run.precision,
            optimizer=_optimizer(way.optimizer),
        )  # fmt: skip
    except DoesNotFit as error:
        return Simulation(None, why=str(error).partition(". ")[0], cpu_s=time.process_time() - begin_s)
    predicted = plan.predicted
    assert predicted is not None
    peak = max(peak for memory, peak in predicted.peak_bytes.items() if memory.startswith("gpu"))
    may_fetch = strategy == AUTO or "swap=true" in STRATEGIES.get(strategy, strategy)
    if plan.decisions.fetch and not may_fetch:
        return Simulation(None, why=f"{len(plan.decisions.fetch)} stages would have to be fetched")
    cpu_s = time.process_time() - begin_s
    return Simulation(predicted.step_s, peak, plan.passes, cpu_s=cpu_s)


def _optimizer(name: str) -> Any:
    room, _, kind = name.rpartition(".")
    try:
        return getattr(importlib.import_module(room), kind)
    except ImportError as error:
        raise PlanError(
            f"{name}, with which a run was made, is not installed: pip install {room.partition('.')[0]}"
        ) from error


def page(found: Sequence[Compared], command: str) -> str:
    """The page: the summary, the ways, a table for each source, and the runs that have no simulation."""
    shown, left = [c for c in found if not c.reason], [c for c in found if c.reason]
    lines = [
        "# Predicted beside published",
        "",
        f"Made by `{command}`:",
        "runs that others published, beside simulations of our own programs on the same machine. Nothing ran on a GPU.",
        "*As they do it* is the nearest that Penstock has to a system's own way to train, stated below once for each",
        "system; *auto* is the search's choice for the same model, batch and precision. Nothing is fitted to a row.",
        "Speeds are tokens (or images) a second of all GPUs; *ours / theirs* above 1 is faster. Memory is the peak of",
        "the fullest GPU: ours is that of a plan's values, theirs what torch or the driver reported. Where rows are of",
        "several lengths, only memory and fits are compared, by the longest row.",
        "",
        "## Summary",
        "",
        *markdown_table(("what", "result"), summary(found)),
        "",
        "## The ways",
        "",
        "`insert-remat{always=true}` where a run's note says checkpointing, unless a way says it for all its runs.",
        "",
        *markdown_table(("systems", "passes", "why"), _ways(shown)),
    ]
    far = (
        f"Runs whose step is off by more than {FAR:.0%}, whose peak by more than {FAR_PEAK:.0%}, or that fit otherwise."
    )
    lines += ["", "## Where ours differs", "", far, ""]
    lines += markdown_table(("systems", "runs that differ", "likely why"), _differences(shown))
    for source, rows in groupby(shown, lambda each: each.row["source"]):
        lines += ["", f"## {source}", "", *markdown_table(COLUMNS_SHOWN, table_rows(list(rows)))]
    if left:
        missing = [(c.row["system"], c.row["model"], f"{c.row['batch']} x {c.row['seq']}", c.reason) for c in left]
        lines += ["", "## Not simulated", "", *markdown_table(("system", "model", "batch", "why"), missing)]
    return "\n".join(lines) + "\n"


FAR, FAR_PEAK = 0.15, 0.05  # the shares that a step and a peak may be off
COLUMNS_SHOWN = (
    "system", "model", "GPUs", "batch", "theirs", "as they do it", "ours / theirs", "auto", "auto / theirs",
    "their peak", "our peak", "fits: theirs, ours",
)  # fmt: skip


def table_rows(found: Sequence[Compared]) -> list[tuple[str, ...]]:
    """The cells of the runs that have simulations, in the order of `COLUMNS_SHOWN`."""
    return [_cells(each) for each in found if not each.reason]


def summary(found: Sequence[Compared]) -> list[tuple[str, str]]:
    """Each figure by which the page is judged, as words and a result."""
    steps = [abs(each.excess) for each in found if each.excess is not None]
    peaks = [abs(each.peak_excess) for each in found if each.peak_excess is not None]
    fits = [each.fits_alike for each in found if each.fits_alike is not None]
    autos = [each.auto_excess for each in found if each.auto_excess is not None]
    left = sum(bool(each.reason) for each in found)
    rows = [("runs in the table, simulated, not simulated", f"{len(found)}, {len(found) - left}, {left}")]
    rows += [(f"{word} as they do it, of {len(some)} runs: median, worst", _spread(some))
             for word, some in (("step", steps), ("peak", peaks)) if some]  # fmt: skip
    wrong = [each for each in found if each.fits_alike is False]
    rows.append(("fits and misfits that are right", f"{sum(fits)} of {len(fits)}"))
    if wrong:
        rows.append(("of these wrong: theirs fits, ours not", str(sum(bool(c.run and c.run.fits) for c in wrong))))
    fast = sum(excess <= 0 for excess in autos)
    return [*rows, ("`auto` at least as fast as the published run", f"{fast} of {len(autos)} that were searched")]


def _spread(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%}, {max(shares):.0%} off"


def _ways(shown: Sequence[Compared]) -> list[tuple[str, str, str]]:
    """Each way once, with the systems that train so."""
    systems: dict[tuple[str, str], list[str]] = {}
    for each in shown:
        way = way_of(each.row)
        if way is not None:
            known = systems.setdefault((f"`{way.pipeline(each.row['note'])}`", way.why), [])
            known += [] if each.row["system"] in known else [each.row["system"]]
    return [(", ".join(names), passes, why) for (passes, why), names in systems.items()]


def _differences(shown: Sequence[Compared]) -> list[tuple[str, str, str]]:
    """For each reason the systems, and the number of their runs that differ."""
    found: dict[str, list[tuple[str, bool]]] = {}
    for each in shown:
        way = way_of(each.row)
        far = abs(each.excess or 0) > FAR or abs(each.peak_excess or 0) > FAR_PEAK or each.fits_alike is False
        if way is not None and each.theirs is not None:
            found.setdefault(way.differs, []).append((each.row["system"], far))
    return [
        (", ".join(dict.fromkeys(name for name, _ in rows)), f"{sum(far for _, far in rows)} of {len(rows)}", why)
        for why, rows in found.items() if any(far for _, far in rows)
    ]  # fmt: skip


def _cells(each: Compared) -> tuple[str, ...]:
    row, run = each.row, each.run
    assert run is not None
    items = run.batch * (run.sequence if row["seq"][:1].isdigit() and "image" not in row["seq"] else 1)

    def speed(seconds: float | None) -> str:
        return f"{items / seconds:,.0f}" if seconds else ""

    def fits(is_fitting: bool) -> str:
        return "yes" if is_fitting else "no"

    def ours(found: Simulation | None, excess: float | None) -> tuple[str, str]:
        step = "not searched" if found is None else speed(found.step_s) or "does not fit"
        return step, "" if excess is None else f"{1 / (1 + excess):.2f}"

    peak = each.theirs.peak_bytes if each.theirs else None
    disks = f", {row['ssd']}" if len(row["ssd"]) > 1 else ""
    return (
        row["system"], row["model"], f"{row['n_gpus']} x {row['gpu']}{disks}",
        f"{row['batch']} x {row['seq']}", speed(run.seconds) or ("" if run.fits else "OOM"),
        *ours(each.theirs, each.excess), *ours(each.auto, each.auto_excess),
        *(f"{size / 2**30:.1f} GiB" if size else "" for size in (run.peak_bytes, peak)),
        f"{fits(run.fits)}, {'' if each.theirs is None else fits(each.theirs.step_s is not None)}",
    )  # fmt: skip
