"""The first lines of an answer about a plan: does it fit, how fast is it, what bounds it, where its stages are."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import nn

from ...ir import ops
from ...ir.machine.describe import shared_texts
from ...ir.machine.hardware import Hardware
from ...ir.units import figure, format_bytes, format_seconds
from ...runtime.state.quantised import unquantised_note
from ..plan import Plan, Prediction
from .explain import device_name
from .tiers import AGAIN, PLACES, activations_homes, states_tier, weights_home, weights_tier

LABEL = 12  # characters before a line's text
MOST_DEVICES = 4  # that are named
BUSY = {  # a device's stream -> what it does while it is busy
    ops.COMPUTE: "computation on", ops.CPU: "the optimizer on the CPU, for", ops.H2D: "copies from DRAM to",
    ops.D2H: "copies to DRAM from", ops.READ: "reads from SSD for", ops.WRITE: "writes to SSD for",
}  # fmt: skip


def answer_lines(
    model: nn.Module,
    plan: Plan,
    hardware: Hardware,
    stages: Collection[str],
    items: tuple[int, str],
    busiest: tuple[str, float],
) -> list[str]:
    """The lines, labelled. `stages`: their names; `items`: how many a step takes, and the word for one; `busiest`: the
    stream or link that is busy for the largest share of a step, and that share."""
    predicted, (number, item) = plan.predicted, items
    assert predicted is not None
    step_s = predicted.step_s
    bound = f"{_busiest(hardware, *busiest)}; {_gain(predicted)}"
    lines = [
        line("fits", "yes: " + "; ".join([*_peaks(predicted), *shared_texts(hardware)])),
        line("speed", f"{figure(number / step_s)} {item}s a second, a step of {format_seconds(step_s)}"),
        line("bound by", bound),
        line("plan", _stages(plan, hardware, stages)),
    ]
    if idle := _idle_devices(plan, hardware, predicted.peak_bytes):
        lines.append(line("not used", ", ".join(idle)))
    if note := unquantised_note(model):
        lines.append(line("base", note))
    return lines


def line(label: str, text: str) -> str:
    return f"{label:{LABEL - 1}} {text}"


def wrap_lines(lines: Iterable[str], width: int) -> list[str]:
    """Lines of at most this width; a longer line goes on below its text."""
    indent = " " * LABEL
    wrapped = (textwrap.wrap(each, width, subsequent_indent=indent, break_long_words=False) for each in lines)
    return [part for parts in wrapped for part in parts or [""]]


def many(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def _peaks(predicted: Prediction) -> Iterator[str]:
    """Peaks against budgets; devices with equal figures share one."""
    alike: dict[str, list[str]] = {}
    for memory, peak in ((name, num) for name, num in predicted.peak_bytes.items() if num):
        budget = predicted.budget_bytes[memory]
        alike.setdefault(f"{format_bytes(peak)} of {format_bytes(budget)} ({peak / budget:.0%})", []).append(memory)
    for text, names in alike.items():
        yield f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} {text}"


def _busiest(hardware: Hardware, name: str, share: float) -> str:
    """The stream or link that is busiest, in words and by the name that tables give it."""
    link = hardware.links().get(name)
    if link is not None:
        text = f"the link {name} from {link.tail} to {link.head}"
    else:
        device, _, stream = name.partition(" ")
        text = f"{BUSY[stream]} {device}" if stream in BUSY else f"the stream {name}"
    return f"{text}, busy {share:.0%} of a step"


def _gain(predicted: Prediction) -> str:
    return "no bound is known" if predicted.savings is None else predicted.savings.text


def _stages(plan: Plan, hardware: Hardware, names: Collection[str]) -> str:
    """Stages folded: how many, where, and the tiers that they use."""
    decisions, mesh = plan.decisions, plan.decisions.mesh
    devices = dict.fromkeys(device_name(hardware, device, mesh) for device in decisions.devices)
    where = (" and " if len(devices) == 2 else ", ").join(devices)
    if len(devices) > MOST_DEVICES:
        where = f"{next(iter(devices))} and {len(devices) - 1} more"
    lanes = f"{mesh.describe()}, " if mesh is not None and len(mesh.lanes) > 1 else ""
    parts = [f"{lanes}{many(len(names), 'stage')} on {where}, {many(plan.micro_batches, 'micro-batch', 'es')}"]

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


def _idle_devices(plan: Plan, hardware: Hardware, peak_bytes: Mapping[str, int]) -> list[str]:
    """The devices that a plan without lanes leaves alone; those of lanes have equal work."""
    if plan.decisions.mesh is not None:
        return []
    return [device.name for device in hardware.devices if not peak_bytes.get(device.name)]
