"""The table of adapters: each frozen base and rank that fits a machine, with its speed; one plan and one row for each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ..compiler.models.bases import BASES
from ..ir.errors import DoesNotFit
from ..ir.units import format_bytes, format_seconds
from .options import JobOptions
from .tables import table


@dataclass(frozen=True)
class AdapterRow:
    """One base with one rank. `bound_s`: the bound that no step undercuts, whatever its kernels, and `bound_by`
    why. `reason` says why it does not fit, with the nearest that does; then all figures are None."""

    base: str
    rank: int
    reason: str = ""
    step_s: float | None = None
    tokens_per_s: float | None = None
    bound_s: float | None = None
    bound_by: str = ""
    bottleneck: str = ""
    peak_bytes: dict[str, int] | None = None
    moved_bytes: dict[str, int] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def adapter_rows(options: JobOptions, ranks: Sequence[int], tell: Callable[[str], None]) -> list[AdapterRow]:
    """Rows of all bases and ranks. `tell` hears of each before it is planned. Raises an error of the model or of the
    hardware document itself."""
    rows = []
    for base in BASES:
        for rank in ranks:
            tell(f"a base of {base} with rank {rank}")
            chosen = dataclasses.replace(options, base=base, adapter=f"lora:r={rank}")
            try:
                job = chosen.compile()
            except DoesNotFit as error:
                rows.append(AdapterRow(base, rank, " ".join(str(error).split())))
                continue
            found = job.plan.predicted
            assert found is not None
            rows.append(
                AdapterRow(
                    base,
                    rank,
                    step_s=found.step_s,
                    tokens_per_s=options.batch * options.sequence / found.step_s,
                    bound_s=found.bound_s,
                    bound_by=found.bound_by,
                    bottleneck=found.bottleneck,
                    peak_bytes=found.peak_bytes,
                    moved_bytes=found.moved_bytes,
                )
            )
    return rows


def adapter_tables(rows: Sequence[AdapterRow]) -> list[Table]:
    """The rows for people: speeds, and reasons where a base does not fit."""
    columns = ("base", "rank", "step", "tokens/s", "at best", "bound by", "peaks")
    found = [table("LoRA on this machine", columns, [_cells(row) for row in rows])]
    misses = [(f"{row.base}, r={row.rank}", row.reason) for row in rows if row.reason]
    if misses:
        found.append(table("does not fit", ("base", "why, and the nearest that fits"), misses))
    return found


def _cells(row: AdapterRow) -> tuple[str, ...]:
    if row.step_s is None or row.tokens_per_s is None or row.bound_s is None:
        return row.base, str(row.rank), "does not fit", "", "", "", ""
    peaks = ", ".join(f"{memory} {format_bytes(peak)}" for memory, peak in (row.peak_bytes or {}).items() if peak)
    best = f"{format_seconds(row.bound_s)} ({row.bound_by})"
    rate = f"{row.tokens_per_s:,.0f}"
    return row.base, str(row.rank), format_seconds(row.step_s), rate, best, row.bottleneck, peaks
