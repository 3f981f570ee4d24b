"""All that the page shows of a plan, as plain data."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....ir import ops
from ....ir.machine.hardware import Hardware
from ....ir.program import Program, place_of
from ....runtime.simulate import Timeline
from ...folder import Folder
from ...plan import Plan, Rival
from ...search.what_helps import Help
from ...steps import simulate_here
from ..answer import many
from ..explain import device_name
from ..tiers import activations_tier, states_tier, weights_home, weights_text
from ..wear import wear_of
from .held import memories
from .machine import machine_facts
from .spans import PRECISE, CodeLines, columns, measured_rows, predicted_rows, streams_of
from .spent import spent_seconds

MOST_RIVALS = 40
LITTLE = 0.5  # of a device's budget; less is commented
PASS = re.compile(r"[a-z0-9-]+(?:\{[^}]*\})?")  # of a pipeline's text


@dataclass(frozen=True)
class ReportInputs:
    """The inputs of a page. `measured`: the last step, if one was made; `tokens`: of a step; `machines`: the same
    model on other machines, a mapping with "machine", "step_s" or "reason", and prices, for each."""

    plan: Plan
    programs: Sequence[Program]
    hardware: Hardware
    folder: Folder
    measured: Timeline | None = None
    helps: Sequence[Help] = ()
    tokens: int | None = None
    machines: Sequence[Mapping[str, Any]] = field(default_factory=list)
    price_per_hour: float | None = None  # in dollars, where the hardware has none


def report_facts(given: ReportInputs) -> dict[str, Any]:
    """The facts of a page. Times of timelines are whole numbers of `unit_s`."""
    plan, hardware, programs = given.plan, given.hardware, given.programs
    timeline = simulate_here(programs, hardware, plan.precision)
    num_devices = len(timeline.device_names)
    places = [place_of(given.folder.interface, device) for device in range(num_devices)]
    roles = [role for _, role in places]
    lines = CodeLines(programs, given.folder.files)
    measured = given.measured if given.measured is not None and given.measured.spans else None
    longest_s = max(timeline.from_rest_s, measured.from_rest_s if measured else 0.0)
    unit_s = longest_s / PRECISE or 1.0
    rows = predicted_rows(timeline, programs, roles, lines)
    found = measured_rows(measured, rows) if measured else []
    keys = streams_of([*rows, *found])
    streams = {key: number for number, key in enumerate(keys)}
    return {
        "verdict": _verdict(given, timeline, measured),
        "machine": machine_facts(hardware, timeline, plan.predicted),
        "stages": _stages(plan, programs, hardware),
        "unit_s": unit_s,
        "streams": [[device, stream] for device, stream in keys],
        "device_names": list(timeline.device_names),
        "device_role": roles,
        "device_lane": [lane for lane, _ in places],
        "predicted": columns(rows, streams, unit_s),
        "measured": columns(found, streams, unit_s) if measured else None,
        "roles": lines.roles,
        "ops": lines.ops(),
        "producers": lines.producers(programs),
        "memory": memories(timeline, rows, programs, roles, hardware, plan.predicted, unit_s),
        "spent": [
            {"device": timeline.device_names[number], **parts}
            for number, parts in enumerate(spent_seconds(timeline.spans, num_devices, timeline.from_rest_s))
        ],
        "rivals": _rivals(plan),
        "helps": [dataclasses.asdict(each) for each in given.helps],
        "machines": [dict(row) for row in given.machines],
    }


def _verdict(given: ReportInputs, timeline: Timeline, measured: Timeline | None) -> dict[str, Any]:
    plan, predicted = given.plan, given.plan.predicted
    busy = {name: share * timeline.step_s for name, share in timeline.link_busy.items()}
    link = max(busy, key=lambda name: busy[name], default="")
    prices = [host.price_dollars_per_hour for host in given.hardware.hosts]
    known = [price for price in prices if price is not None]
    return {
        "model": plan.model,
        "hardware": plan.hardware,
        "plan": plan.hash,
        "strategy": plan.strategy,
        "precision": plan.precision,
        "micro_batches": plan.micro_batches,
        "stages": len(plan.decisions.stages),
        "step_s": timeline.step_s,
        "from_rest_s": timeline.from_rest_s,
        "measured_s": measured.from_rest_s if measured else None,
        "tokens": given.tokens,
        "bottleneck": predicted.bottleneck if predicted else timeline.bottleneck()[0],
        "bound_s": predicted.eager_bound_s if predicted else 0.0,
        "bound_by": predicted.eager_bound_by if predicted else "",
        "could_save": predicted.savings.text if predicted and predicted.savings else "",
        "busiest_link": link,
        "busiest_link_s": busy.get(link, 0.0),
        "peaks": [
            {
                "name": name,
                "peak": peak,
                "budget": predicted.budget_bytes[name],
                "measured": (measured.peak_bytes if measured else {}).get(name),
                "comment": room_comment(given, name, peak / max(1, predicted.budget_bytes[name])),
            }
            for name, peak in predicted.peak_bytes.items()
        ]
        if predicted
        else [],
        "wear": [{**dataclasses.asdict(wear), "days": wear.days} for wear in wear_of(predicted, given.hardware)]
        if predicted
        else [],
        "price_per_hour": sum(known) if len(known) == len(prices) else given.price_per_hour,
    }


def room_comment(given: ReportInputs, name: str, share: float) -> str:
    """The reason why a device is not half full; empty for other memories, and for a device that is."""
    plan, hardware = given.plan, given.hardware
    if name not in hardware.device_by_name or share >= LITTLE:
        return ""
    if share == 0:
        return "this plan leaves it alone: no plan that was tried and uses it is faster"
    decisions, specs = plan.decisions, given.programs[0].interface.stages.values()
    own = [
        spec
        for spec, device in zip(specs, decisions.devices)
        if name in device_name(hardware, device, decisions.mesh).split()
    ]
    waits = decisions.sharding is not None or any(weights_home(decisions, spec.name) != ops.DEVICE for spec in own)
    again = any(spec.name in decisions.rematerialise for spec in own)
    if not waits and not again:
        return "it holds everything that its stages need; more rows or tokens would use the rest"
    bound = plan.predicted.bottleneck if plan.predicted else "another part"
    return f"no plan that was tried and holds more here is faster, as the step is bound by {bound}"


def _stages(plan: Plan, programs: Sequence[Program], hardware: Hardware) -> list[dict[str, Any]]:
    decisions = plan.decisions
    return [
        {
            "name": spec.name,
            "title": spec.title,
            "device": device_name(hardware, device, decisions.mesh),
            "weights": weights_text(decisions, spec),
            "states": states_tier(decisions, spec.name),
            "activations": activations_tier(decisions, spec.name),
        }
        for spec, device in zip(programs[0].interface.stages.values(), decisions.devices)
    ]


def _rivals(plan: Plan) -> list[dict[str, Any]]:
    rows, alike = plan.distinct_rivals()
    known = sorted((rival for rival in rows if rival.step_s is not None), key=lambda rival: rival.step_s or 0.0)
    others = [rival for rival in rows if rival.step_s is None]
    shown = [*known, *others][:MOST_RIVALS]
    found = [
        {"name": rival.name, "step_s": rival.step_s, "reason": rival.reason, "differs": difference(plan, rival)}
        for rival in shown
    ]
    left = len(rows) - len(shown) + alike
    more = {"name": f"{left} more", "step_s": None, "reason": "for the same reasons", "differs": ""}
    return [*found, more] if left else found


def difference(plan: Plan, rival: Rival) -> str:
    """The passes and micro-batches of a rival that the plan does not have, and the other way round."""
    if not rival.passes:
        return ""
    own, other = (PASS.findall(text) for text in (plan.passes, rival.passes))
    with_text = ", ".join(text for text in other if text not in own)
    without = ", ".join(text for text in own if text not in other)
    parts = [f"{word} {text}" for word, text in (("with", with_text), ("without", without)) if text]
    if rival.micro_batches not in (None, plan.micro_batches):
        parts.append(f"{many(rival.micro_batches or 0, 'micro-batch', 'es')} instead of {plan.micro_batches}")
    return "; ".join(parts)
