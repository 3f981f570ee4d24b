"""Plans and timelines as tables for a terminal, and as plain data for other programs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ..compiler.check.check import CheckReport
from ..compiler.plan import Plan, Prediction
from ..compiler.report.explain import device_name, wear_text
from ..compiler.report.tiers import activations_tier, weights_tier
from ..compiler.report.wear import Wear, wear_of
from ..ir.machine.hardware import Hardware
from ..ir.program import StageSpec
from ..ir.units import format_bytes
from ..runtime.simulate import Timeline
from .terminal.spelling import Screen

FILE_WIDTH = 120
SHORT = {
    "on the device": "device", "DRAM, fetched for each use": "DRAM, fetched",
    "SSD, read and fetched for each use": "SSD, read, fetched",
}  # fmt: skip


def short_tier(tier: str) -> str:
    """A tier's short text. That of shards, which says where they are and how often gathered, is short enough."""
    return SHORT.get(tier, tier)


def console() -> Console:
    """A console for tables on stdout, as wide as the terminal, or wide enough for a table in a file."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Screen(markup=False, emoji=False, highlight=False, width=width)


def plan_tables(plan: Plan, stages: Sequence[StageSpec], hardware: Hardware) -> Iterator[Table]:
    """Tables of a plan's stages, memories, SSDs, links, rivals and remarks."""
    yield stage_table(plan, stages, hardware)
    if plan.predicted is not None:
        yield memory_table(plan.predicted)
        if wears := wear_of(plan.predicted, hardware):
            yield table("SSDs", ("memory", "in a step", "in a day", "lasts"), [_wear_row(wear) for wear in wears])
        yield amounts_table("moved a step", "link", plan.predicted.moved_bytes)
    if plan.rivals:
        rivals, alike = plan.distinct_rivals()
        rows = [(rival.name, rival.reason) for rival in rivals]
        rows += [(f"{alike} more", "give a plan already listed")] if alike else []
        yield table("rivals", ("candidate", "why not"), rows)
    if plan.notes:
        yield table("remarks", ("pass", "remark"), list(plan.notes.items()))


def stage_table(plan: Plan, stages: Sequence[StageSpec], hardware: Hardware) -> Table:
    """One row per run of stages that differ only in their place."""
    decisions = plan.decisions
    rows = []
    described = [
        (
            len(blocks),
            format_bytes(spec.all_weight_bytes),
            short_tier(weights_tier(decisions, spec.name)),
            format_bytes(spec.kept_bytes),
            activations_tier(decisions, spec.name),
            decisions.optimizer.get(spec.name, ""),
        )
        for spec, blocks in zip(stages, decisions.stages)
    ]
    for look, run in itertools.groupby(range(len(stages)), key=lambda i: described[i]):
        members = list(run)
        first, last = stages[members[0]], stages[members[-1]]
        name = first.name if first is last else f"{first.name} to {last.name}"
        ends = (first.title.partition(" to ")[0], last.title.rpartition(" to ")[2])
        title = first.title if first is last else " to ".join(ends)
        devices = dict.fromkeys(device_name(hardware, decisions.devices[i], decisions.mesh) for i in members)
        rows.append((name, " ".join(devices), title, *look[1:]))
    columns = ("stage", "device", "holds", "weights", "live in", "saves", "its tensors", "stepped on")
    return table("stages", columns, rows)


def _wear_row(wear: Wear) -> tuple[str, ...]:
    step, day, *lasts = wear_text(wear)
    return (wear.memory, step.partition(": ")[2], day, *(lasts or [""]))


def memory_table(predicted: Prediction) -> Table:
    rows = []
    for memory, peak in predicted.peak_bytes.items():
        budget = predicted.budget_bytes[memory]
        rows.append((memory, format_bytes(peak), format_bytes(budget), f"{peak / budget:.0%}"))
    return table("memory", ("memory", "peak", "budget", "used"), rows)


def timeline_tables(timeline: Timeline) -> Iterator[Table]:
    """Tables of a timeline: busy share per device and stream, peaks, bytes per link."""
    streams = list(dict.fromkeys(stream for _, stream in timeline.busy_share))
    rows = []
    for device, name in enumerate(timeline.device_names):
        shares = [timeline.busy_share.get((device, stream)) for stream in streams]
        rows.append((name, *("" if share is None else f"{share:.0%}" for share in shares)))
    yield table("busy share of the step", ("device", *streams), rows)
    yield amounts_table("peak", "memory", timeline.peak_bytes)
    yield amounts_table("moved a step", "link", timeline.moved_bytes)


def timeline_json(timeline: Timeline) -> dict[str, Any]:
    """Seconds, shares and bytes of a timeline, without its spans."""
    return {
        "step_s": timeline.step_s,
        "from_rest_s": timeline.from_rest_s,
        "bottleneck": timeline.bottleneck()[0],
        "busy_share": {f"{timeline.device_names[d]} {s}": share for (d, s), share in timeline.busy_share.items()},
        "peak_bytes": dict(timeline.peak_bytes),
        "moved_bytes": {link: moved for link, moved in timeline.moved_bytes.items() if moved},
    }


def check_table(report: CheckReport) -> Table:
    """One row per kind of number, with a verdict."""
    rows = [
        (
            row.what,
            row.against,
            f"{row.largest:.3g}",
            row.where,
            f"{row.relative:.2g}",
            f"{row.limit:g}",
            "equal" if row.passed else "DIFFERS",
        )
        for row in report.differences
    ]
    columns = ("number", "against", "largest difference", "where", "relative", "allowed", "verdict")
    return table(f"the plan against plain PyTorch, {len(report.losses)} steps", columns, rows)


def amounts_table(title: str, what: str, amounts: Any) -> Table:
    """A table of bytes by name, without names that have none."""
    return table(title, (what, "bytes"), [(name, format_bytes(amount)) for name, amount in amounts.items() if amount])


def table(title: str, columns: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
