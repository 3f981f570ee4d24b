"""`penstock profile`: each distinct block's measured seconds beside those that follow from the hardware's rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ..compiler.batches.shape import BatchShape, micro_batch_spec
from ..compiler.loss import capture
from ..compiler.pipeline import parse_pipeline, run_passes
from ..compiler.profile.profile import make_profiler, parts_here
from ..compiler.search.candidates import micro_batch_counts
from ..compiler.strategies import BEFORE_BLOCKS
from ..graph.blocks import Block
from ..graph.costs.stage_time import roofline
from ..graph.profile import distinct
from ..ir.machine.hardware import Device
from ..ir.precision import Precision
from ..ir.units import format_bytes, format_seconds
from ..passes.draft import Draft, Options
from .options import JobOptions

COLUMNS = ("block", "times", "weights", "forward", "again", "backward", "by rates", "backward", "measured")
_SECONDS = ("forward_s", "rematerialise_s", "backward_s", "roofline_forward_s", "roofline_backward_s")


@dataclass(frozen=True)
class ProfileRow:
    """One distinct block on one kind of device. Seconds are those of one micro-batch."""

    device: str
    block: str
    hash: str
    count: int  # blocks of this hash
    param_bytes: int
    forward_s: float
    rematerialise_s: float
    backward_s: float
    roofline_forward_s: float
    roofline_backward_s: float


@dataclass(frozen=True)
class ProfileReport:
    """The measured blocks of each kind of device."""

    micro_batches: int
    parts: dict[str, list[ProfileRow]]  # the kind of device -> rows

    def to_json(self) -> dict[str, Any]:
        rows = {title: [asdict(row) for row in rows] for title, rows in self.parts.items()}
        return {"micro_batches": self.micro_batches, "devices": rows}


def profile_report(options: JobOptions) -> ProfileReport:
    """Measure, or read from the cache, every distinct block of the model that the options name.

    Raises `HardwareError` for hardware that is not here.
    """
    hardware, named = options.machine(), options.named_model()
    parts = parts_here(hardware)  # raises before the model is traced
    model, example = named.on_meta(), named.batch_spec(options.batch, options.sequence)
    shape = BatchShape.from_inputs(model, example)
    if options.micro_batches is not None:
        shape.check_divisible(options.micro_batches)
    count = options.micro_batches or micro_batch_counts(shape.size, hardware)[0][0]
    precision = Precision.of(options.precision_on(hardware))
    inputs = micro_batch_spec(example, count)
    graph = capture(model, inputs, precision=precision, device_kind=hardware.devices[0].kind)
    profiler = make_profiler(options.profile_cache or True, precision.name)
    draft = Draft(graph, hardware, Options(micro_batches=count, precision=precision.name, profiler=profiler))
    run_passes(draft, parse_pipeline(f"{BEFORE_BLOCKS}, coarsen", hardware.num_devices), check=False)
    return ProfileReport(count, {p.title: _rows(draft.blocks, p.devices[0], precision.name) for p in parts})


def _rows(blocks: list[Block], device: Device, precision: str) -> list[ProfileRow]:
    counts = Counter(block.hash for block in blocks)
    rows = []
    for found, block in distinct(blocks).items():
        seconds, expected = block.seconds[device.name], roofline(block.cost, device, precision)
        rows.append(
            ProfileRow(
                device.name,
                block.name,
                found,
                counts[found],
                block.param_bytes,
                seconds.forward_s,
                seconds.rematerialise_s,
                seconds.backward_s,
                expected.forward_s,
                expected.backward_s,
            )
        )
    return rows


def profile_tables(report: ProfileReport) -> Iterator[Table]:
    """One table per kind of device; its last row is the whole model, each block times the number of its occurrences."""
    for title, rows in report.parts.items():
        table = Table(
            title=f"{title}: one of {report.micro_batches} micro-batches", title_justify="left", title_style="bold"
        )
        for name in COLUMNS:
            table.add_column(name, overflow="fold")
        for row in rows:
            times = (row.forward_s, row.rematerialise_s, row.backward_s)
            roofline = (row.roofline_forward_s, row.roofline_backward_s)
            table.add_row(*_line(row.block, row.count, row.param_bytes, times, roofline))
        total = [sum(r.count * getattr(r, name) for r in rows) for name in _SECONDS]
        weights = sum(r.count * r.param_bytes for r in rows)
        table.add_row(*_line("all", sum(r.count for r in rows), weights, total[:3], total[3:]))
        yield table


def _line(name: str, count: int, weights: int, measured: Any, roofline: Any) -> tuple[str, ...]:
    ratio = (measured[1] + measured[2]) / sum(roofline)
    seconds = [format_seconds(value) for value in (*measured, *roofline)]
    return (name, str(count), format_bytes(weights), *seconds, f"{ratio:.2f} x rates")
