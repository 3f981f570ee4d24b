"""Why this plan: what bounds the step, what would help, what the rivals were. Text for people, nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..runtime import ops
from ..runtime.hardware import Hardware
from ..runtime.program import Program
from ..runtime.simulate import simulate
from ..runtime.units import format_bytes, format_seconds
from .plan import Plan
from .strategies import PassRecord

FASTER = 2.0  # what-if questions double one rate


def explain(plan: Plan, programs: Sequence[Program], hardware: Hardware, records: Sequence[PassRecord] = ()) -> str:
    """The plan in a page: stages, prediction, bounds, what would help, rivals and passes."""
    parts = [_stages(plan, programs, hardware), _prediction(plan), _bounds(plan, programs, hardware)]
    parts += [_rivals(plan), _passes(records)]
    return "\n\n".join(part for part in parts if part)


def _stages(plan: Plan, programs: Sequence[Program], hardware: Hardware) -> str:
    decisions = plan.decisions
    lines = [
        f"{plan.model} on {plan.hardware}",
        f"plan {plan.hash}: {len(decisions.stages)} stages, {plan.micro_batches} micro-batches, {plan.precision}",
    ]
    specs = list(programs[0].interface.stages.values())
    for spec, device in zip(specs, decisions.devices):
        tier = "DRAM, fetched for each use" if spec.name in decisions.fetch else "on the device"
        saved = "rematerialised" if spec.name in decisions.rematerialise else "kept"
        lines.append(
            f"  {spec.name:8} {hardware.devices[device].name:6} {spec.title}: "
            f"weights {format_bytes(spec.weight_bytes)} {tier}; "
            f"saved tensors {format_bytes(spec.kept_bytes)} a micro-batch, {saved}"
        )
    return "\n".join(lines)


def _prediction(plan: Plan) -> str:
    p = plan.predicted
    if p is None:
        return ""
    lines = [f"predicted step {format_seconds(p.step_s)}, bound by {p.bottleneck}"]
    for memory, peak in p.peak_bytes.items():
        budget = p.budget_bytes[memory]
        lines.append(f"  {memory:6} peak {format_bytes(peak)} of {format_bytes(budget)} ({peak / budget:.0%})")
    moved = ", ".join(f"{link} {format_bytes(num)}" for link, num in p.moved_bytes.items())
    lines.append(f"  moved a step: {moved or 'nothing'}")
    return "\n".join(lines)


def _bounds(plan: Plan, programs: Sequence[Program], hardware: Hardware) -> str:
    """Lower bounds that no schedule of these stages beats, and the same programs on faster parts."""
    timeline = simulate(programs, hardware, precision=plan.precision)
    busiest: dict[str, float] = {}
    for (_, stream), share in timeline.busy_share.items():
        busiest[stream] = max(busiest.get(stream, 0.0), share * timeline.step_s)
    compute = busiest.get(ops.COMPUTE, 0.0)
    links = max((share * timeline.step_s for share in timeline.link_busy.values()), default=0.0)
    lines = [
        f"no schedule of these stages is faster than its busiest device's computation, {format_seconds(compute)}, "
        f"or its busiest link, {format_seconds(links)}; this one takes "
        f"{timeline.step_s / max(compute, links):.2f}x the larger",
        f"if one part were {FASTER:g}x as fast:",
    ]
    for what, machine in _faster(hardware):
        step_s = simulate(programs, machine, precision=plan.precision).step_s
        lines.append(f"  {what:24} {format_seconds(step_s)} a step, {1 - step_s / timeline.step_s:.0%} less")
    return "\n".join(lines)


def _faster(hardware: Hardware) -> Iterator[tuple[str, Hardware]]:
    """The same machine with one kind of part sped up."""

    def scaled(part: Any, *names: str) -> Any:
        return part.model_copy(update={name: getattr(part, name) * FASTER for name in names})

    devices = [
        scaled(device, "memory_bandwidth").model_copy(
            update={
                "peak_flops": {dtype: rate * FASTER for dtype, rate in device.peak_flops.items()},
                "op_overhead_s": device.op_overhead_s / FASTER,
            }
        )
        for device in hardware.devices
    ]
    yield "computation", hardware.model_copy(update={"devices": devices})
    devices = [scaled(device, "h2d_bandwidth", "d2h_bandwidth") for device in hardware.devices]
    hosts = [
        host.model_copy(
            update={"root_complexes": [scaled(r, "bandwidth_up", "bandwidth_down") for r in host.root_complexes]}
        )
        for host in hardware.hosts
    ]
    yield "host-device links", hardware.model_copy(update={"devices": devices, "hosts": hosts})
    hosts = [scaled(host, "optimizer_params_per_s") for host in hardware.hosts]
    yield "optimizer on the host", hardware.model_copy(update={"hosts": hosts})


def _rivals(plan: Plan) -> str:
    if not plan.rivals:
        return ""
    lines = ["rivals"]
    lines += [f"  {rival.name}: {rival.reason}" for rival in sorted(plan.rivals, key=lambda r: r.step_s or 1e30)]
    return "\n".join(lines)


def _passes(records: Sequence[PassRecord]) -> str:
    if not records:
        return ""
    lines = ["passes"]
    for record in records:
        step = f", step {format_seconds(record.step_s)}" if record.step_s is not None else ""
        peak = f", peak {format_bytes(record.peak_bytes)}" if record.peak_bytes is not None else ""
        lines.append(f"  {record.name:20} {format_seconds(record.took_s)}, {record.ops_added:+d} ops{step}{peak}")
    return "\n".join(lines)
