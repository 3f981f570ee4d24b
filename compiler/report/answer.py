"""The answer about a plan in a few lines: whether it fits, how fast it is, what bounds it, and where its parts are.

`penstock plan` prints these lines with costs and alternatives, `explain` prints them before everything else.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ...ir import ops
from ...ir.machine.describe import shared_texts
from ...ir.machine.hardware import Hardware
from ...ir.program import Program
from ...ir.units import count_text, figure, format_bytes, format_seconds
from ...runtime.simulate import Timeline
from ..folder import BatchRow
from ..plan import Plan
from .explain import device_name
from .tiers import AGAIN, PLACES, activations_homes, states_tier, weights_home, weights_tier

LABEL = 12  # characters before a line's text
WIDTH = 118
MOST_DEVICES = 4  # that are named
BUSY = {  # a device's stream -> what it does while it is busy
    ops.COMPUTE: "computation on", ops.CPU: "the optimizer on the CPU, for", ops.H2D: "copies from DRAM to",
    ops.D2H: "copies to DRAM from", ops.READ: "reads from SSD for", ops.WRITE: "writes to SSD for",
}  # fmt: skip


def line(label: str, text: str) -> str:
    return f"{label:{LABEL - 1}} {text}"


def wrap_lines(lines: Iterable[str], width: int = WIDTH) -> list[str]:
    """Lines that are too long go on below their text."""
    wrapped = (textwrap.wrap(text, width, subsequent_indent=" " * LABEL, break_long_words=False) for text in lines)
    return [part for parts in wrapped for part in parts or [""]]


def title_line(model: str, rows: str, plan: Plan, hardware: Hardware) -> str:
    return f"{model} on {hardware.name}: {rows}, {plan.precision}, plan {plan.hash}"


def core_lines(
    plan: Plan, programs: Sequence[Program], hardware: Hardware, timeline: Timeline, items: int, item: str
) -> list[str]:
    """The lines on memory, speed, bound and plan. `items`: tokens, images or rows of a step, whose word is `item`."""
    assert plan.predicted is not None
    step_s = plan.predicted.step_s
    lines = [
        line("fits", "yes: " + "; ".join([*_peaks(plan), *shared_texts(hardware)])),
        line("speed", f"{figure(items / step_s)} {item}s a second, a step of {format_seconds(step_s)}"),
        line("bound by", f"{_busiest(hardware, timeline)}; {_gain(plan)}"),
        line("plan", _stages(plan, hardware, list(programs[0].interface.stages))),
    ]
    if idle := _idle_devices(plan, hardware):
        lines.append(line("not used", ", ".join(idle)))
    return lines


def brief_lines(
    plan: Plan, programs: Sequence[Program], hardware: Hardware, timeline: Timeline, batch: Sequence[BatchRow]
) -> list[str]:
    """The answer for a job whose batch has these tensors."""
    shapes = [shape for name, shape, _ in batch if name.endswith("input_ids") and len(shape) == 2]
    rows = next((shape[0] for _, shape, _ in batch if shape), 1)
    text, items, item = count_text(rows, "row"), rows, "row"
    if shapes:
        items, item = sum(map(math.prod, shapes)), "token"
        text += f" of {count_text(items // rows, item)}"
    return [
        title_line(plan.model, text, plan, hardware),
        *core_lines(plan, programs, hardware, timeline, items, item),
        line("more", "explain with full=True (--full): stages, memories, bounds, what would help, rivals, passes"),
    ]


def _peaks(plan: Plan) -> Iterator[str]:
    """Peaks against budgets; devices with equal figures share one."""
    assert plan.predicted is not None
    alike: dict[str, list[str]] = {}
    for memory, peak in ((name, num) for name, num in plan.predicted.peak_bytes.items() if num):
        budget = plan.predicted.budget_bytes[memory]
        alike.setdefault(f"{format_bytes(peak)} of {format_bytes(budget)} ({peak / budget:.0%})", []).append(memory)
    for text, names in alike.items():
        yield f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} {text}"


def _busiest(hardware: Hardware, timeline: Timeline) -> str:
    """The stream or link that is busiest, in words and by the name that tables give it."""
    name, share = timeline.bottleneck()
    if (link := hardware.links().get(name)) is not None:
        text = f"the link {name} from {link.tail} to {link.head}"
    else:
        device, _, stream = name.partition(" ")
        text = f"{BUSY[stream]} {device}" if stream in BUSY else f"the stream {name}"
    return f"{text}, busy {share:.0%} of a step"


def _gain(plan: Plan) -> str:
    savings = plan.predicted.savings if plan.predicted is not None else None
    return "no bound is known" if savings is None else savings.text


def _stages(plan: Plan, hardware: Hardware, names: Sequence[str]) -> str:
    """Stages folded: how many, where, and the tiers that they use."""
    decisions = plan.decisions
    mesh = decisions.mesh
    devices = dict.fromkeys(device_name(hardware, device, mesh) for device in decisions.devices)
    where = (" and " if len(devices) == 2 else ", ").join(devices)
    if len(devices) > MOST_DEVICES:
        where = f"{next(iter(devices))} and {len(devices) - 1} more"
    lanes = f"{mesh.describe()}, " if mesh is not None and len(mesh.lanes) > 1 else ""
    micro_batches = count_text(plan.micro_batches, "micro-batch", "es")
    parts = [f"{lanes}{count_text(len(names), 'stage')} on {where}, {micro_batches}"]

    def weights(name: str) -> str:
        sharded = decisions.sharding is not None
        return weights_tier(decisions, name) if sharded else PLACES[weights_home(decisions, name)]

    for what, tier in (
        ("weights", weights),
        ("optimizer states", lambda name: states_tier(decisions, name) or "none"),
        ("activations", lambda name: AGAIN if name in decisions.rematerialise else "kept"),
    ):
        tiers = dict.fromkeys(tier(name) for name in names)
        parts.append(f"{what} {' or '.join(tiers)}")
    moved = [PLACES[memory] for memory in activations_homes(decisions)]
    return "; ".join(parts) + (f", some wait {' and '.join(moved)}" if moved else "")


def _idle_devices(plan: Plan, hardware: Hardware) -> list[str]:
    """The devices that a plan without lanes leaves alone; those of lanes have equal work."""
    if plan.decisions.mesh is not None or plan.predicted is None:
        return []
    return [device.name for device in hardware.devices if not plan.predicted.peak_bytes.get(device.name)]
