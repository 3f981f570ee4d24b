"""Explains a plan: what bounds the step, what would help, the rivals. Text for people, nothing else."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...graph.follow.coupling import fact_lines
from ...graph.follow.rows import MEAN_OVER_ROWS, RowFacts
from ...graph.loss_terms import LossTerm
from ...ir import ops
from ...ir.machine.describe import shared_texts
from ...ir.machine.hardware import Hardware
from ...ir.program import Drain, Program, bind_one, gpu_connections, pooled_bytes
from ...ir.units import format_bytes, format_seconds
from ...passes.base import Explanation
from ...passes.decisions import Lanes
from ...passes.table import PASSES
from ...runtime.optimizer.spec import OptimizerSpec
from ...runtime.simulate import Timeline
from ..pipeline import PassRecord
from ..plan import Plan, Prediction
from ..search.host_memory import host_of
from ..search.what_helps import Help, changed_machines
from ..steps import drain_here, simulate_here
from .loss import loss_lines
from .tiers import AGAIN, activations_tier, states_tier, weights_text
from .updates import update_lines
from .wear import Wear, wear_of

WIDTH = 110
FEW_NAMES = 4  # of devices; more names are abridged


def explain(
    plan: Plan,
    programs: Sequence[Program],
    hardware: Hardware,
    records: Sequence[PassRecord] = (),
    helps: Sequence[Help] | None = None,
    loss: Sequence[LossTerm] = (),
    rows: RowFacts = MEAN_OVER_ROWS,
    optimizer: OptimizerSpec | None = None,
) -> str:
    """The plan in a page: stages, terms of the loss, prediction, bounds, what would help, rivals and passes.

    `helps`: plans for other machines; without them the same programs are simulated on faster parts.
    """
    explanations = [kind.explain(plan.decisions, programs) for kind in PASSES.values()]
    parts = [
        "\n".join([*_stages(plan, programs, hardware), *_lines(e for e in explanations if not e.heading)]),
        *("\n".join([e.heading, *_lines([e])]) for e in explanations if e.heading),
        _updates(programs, hardware, optimizer),
        _loss(loss, programs),
        _rows(rows, programs),
        _prediction(plan, programs, hardware),
        _bounds(plan, programs, hardware),
    ]
    parts.append(_same_programs(plan, programs, hardware) if helps is None else _helps(plan, helps))
    parts += [_notes(plan), _rivals(plan), _passes(records)]
    return "\n\n".join(part for part in parts if part)


def _stages(plan: Plan, programs: Sequence[Program], hardware: Hardware) -> list[str]:
    decisions = plan.decisions
    lines = [
        f"{plan.model} on {plan.hardware}",
        f"plan {plan.hash}: {len(decisions.stages)} stages, {plan.micro_batches} micro-batches, {plan.precision}",
    ]
    if decisions.mesh is not None and len(decisions.mesh.lanes) > 1:
        lines.append(f"  {decisions.mesh.describe()}")
    specs = list(programs[0].interface.stages.values())
    for spec, device in zip(specs, decisions.devices):
        saved = activations_tier(decisions, spec.name).replace(AGAIN, "rematerialised")
        on_ssd = spec.name in decisions.ssd.stages and spec.trained_params and not spec.staying
        states = f"optimizer states {states_tier(decisions, spec.name)}; " if on_ssd else ""
        lines.append(
            f"  {spec.name:8} {device_name(hardware, device, decisions.mesh):6} {spec.title}: "
            f"weights {weights_text(decisions, spec)}; {states}"
            f"saved tensors {format_bytes(spec.kept_bytes)} a micro-batch, {saved}"
        )
    return lines


def _lines(explanations: Iterable[Explanation]) -> list[str]:
    return [row for each in explanations for line in each.lines for row in _wrap("  ", [line])]


def _updates(programs: Sequence[Program], hardware: Hardware, optimizer: OptimizerSpec | None) -> str:
    """The paragraph on updates: their place, and how an update goes over the memory of a stage."""
    lines = [] if optimizer is None else update_lines(programs, hardware, optimizer)
    return "\n".join(["updates of stages", *(row for line in lines for row in _wrap("  ", [line]))]) if lines else ""


def _loss(terms: Sequence[LossTerm], programs: Sequence[Program]) -> str:
    """The paragraph on the loss: how the whole batch's is put together from micro-batches."""
    interface = programs[0].interface
    lines = loss_lines(terms, interface.micro_batches_of_update if interface.asynchronous else 0)
    return "\n".join(["loss", *(row for line in lines for row in _wrap("  ", [line]))]) if lines else ""


def _rows(facts: RowFacts, programs: Sequence[Program]) -> str:
    interface = programs[0].interface
    lines = fact_lines(facts, interface.micro_batches_of_update, interface.asynchronous)
    return "\n".join(row for line in lines for row in _wrap("", [line]))


def device_name(hardware: Hardware, device: int, mesh: Lanes | None = None) -> str:
    """The name of a plan's device; with several lanes also of the devices in its place: "gpu0 and 63 more"."""
    if mesh is None or len(mesh.lanes) == 1:
        return hardware.devices[device].name
    names = [hardware.devices[lane[device]].name for lane in mesh.lanes]
    return " ".join(names) if len(names) <= FEW_NAMES else f"{names[0]} and {len(names) - 1} more"


def _prediction(plan: Plan, programs: Sequence[Program], hardware: Hardware) -> str:
    p = plan.predicted
    if p is None:
        return ""
    lines = [f"predicted step {format_seconds(p.step_s)}, bound by {p.bottleneck}"]
    lines += _wrap("  ", [_begin_of_steps(p, drain_here(programs, hardware, plan.precision))])
    for memory, peak in p.peak_bytes.items():
        budget = p.budget_bytes[memory]
        held = [f"{what} {format_bytes(num)}" for what, num in p.parts.get(memory, {}).items()]
        if (loading := p.loading_bytes.get(memory, 0)) > peak:
            held.append(f"{format_bytes(loading)} while weights are loaded")
        begin = f"  {memory:6} peak {format_bytes(peak)} of {format_bytes(budget)} ({peak / budget:.0%})"
        lines += _wrap(f"{begin}: ", held) if held else [begin]
    lines += _pools(programs, hardware)
    lines += [line for text in _connections(programs, hardware) for line in _wrap("  ", [text])]
    lines += [f"  {text}" for text in shared_texts(hardware)]
    lines += _own_copies(hardware)
    lines += _copies(p.copied_bytes, hardware)
    moved = [f"{link} {format_bytes(num)}" for link, num in p.moved_bytes.items()]
    lines += _wrap("  moved a step: ", moved or ["nothing"])
    lines += [line for wear in wear_of(p, hardware) for line in _wrap("  ", wear_text(wear))]
    return "\n".join(lines)


def _begin_of_steps(predicted: Prediction, drain: Drain | None) -> str:
    """Whether each step waits for the end of the one before, and why."""
    if drain is not None:
        return f"each step begins when the one before has ended: {drain.value}"
    from_rest_s = predicted.step_s if predicted.from_rest_s is None else predicted.from_rest_s
    from_rest = format_seconds(from_rest_s)
    return f"each step but the second begins before the one before has ended; from rest a step takes {from_rest}"


def _pools(programs: Sequence[Program], hardware: Hardware) -> Iterator[str]:
    """GPUs whose streams may come to hold more than the budget: no stream can take what another one lets go of."""
    for program in programs:
        device = hardware.devices[program.device]
        held_bytes = pooled_bytes(program) if device.kind == "cuda" else 0
        if held_bytes > device.budget_bytes:
            begin = f"  {device.name:6} its streams may come to hold {format_bytes(held_bytes)}"
            over = f"{format_bytes(held_bytes - device.budget_bytes)} more than the budget"
            yield from _wrap(f"{begin}, {over}: ", ["memory that one stream has let go of, no other one can take"])


def _connections(programs: Sequence[Program], hardware: Hardware) -> Iterator[str]:
    """The communicators of NCCL on each GPU, for the devices of one lane: those of others have the same."""
    rows: dict[str, list[str]] = {}
    for device, found in gpu_connections([bind_one(program, 0) for program in programs], hardware).items():
        reserve = hardware.devices[device].reserve
        words = [f"{found.messages} for messages"] * (found.messages > 0)
        words += [f"{found.groups} for groups"] * (found.groups > 0)
        how = "measured" if found.measured else "not measured: the most by NCCL's source"
        kept = "" if reserve is None else f"; {format_bytes(reserve.messages_bytes)} of the GPU is reserved"
        text = (
            f"communicators: {' and '.join(words)}, {format_bytes(found.rest_bytes)} at rest, {found.connections} "
            f"connections, buffers up to {format_bytes(found.buffer_bytes)} ({how}){kept}"
        )
        rows.setdefault(text, []).append(hardware.devices[device].name)
    yield from (f"  {text}, on {', '.join(names)}" for text, names in rows.items())


def _own_copies(hardware: Hardware) -> Iterator[str]:
    """The memories that hold the script's own copy of the model, beside the plan."""
    rows = [(f"dram{index}", host.model_bytes) for index, host in enumerate(hardware.hosts)]
    rows += [(device.name, device.model_bytes) for device in hardware.devices]
    for memory, num_bytes in rows:
        if num_bytes:
            begin = f"  {memory:6} your own copy of the model {format_bytes(num_bytes)}, which its budget leaves out"
            yield from _wrap(f"{begin}: ", ["on the meta device with weights=DIRECTORY it takes nothing"])


def _copies(copied_bytes: Mapping[str, int], hardware: Hardware) -> Iterator[str]:
    """The copies that a step makes before it, if it may be undone: their bytes are `undo` among those of the memory."""
    for memory, num_bytes in copied_bytes.items():
        own = hardware.device_by_name.get(memory)
        rate = own.memory_bandwidth if own else hardware.hosts[host_of(memory)].dram_bandwidth
        yield (
            f"  {memory:6} {format_bytes(num_bytes)} copied a step, so that updates may be undone: at least "
            f"{format_seconds(2 * num_bytes / rate)}"
        )


def wear_text(wear: Wear) -> list[str]:
    """The bytes that a step reads from and writes to SSDs, and how long the SSDs last."""
    parts = [
        f"{wear.memory}: a step reads {format_bytes(wear.read_bytes)} and writes {format_bytes(wear.written_bytes)}",
        f"{wear.bytes_per_day / 1e12:.3g} TB written in a day of nothing but training",
    ]
    if wear.endurance_bytes is None:
        parts.append("endurance_bytes of its disks in the hardware document would tell how many days they last")
    elif wear.days is not None:
        parts.append(f"{wear.days:.3g} days to the {wear.endurance_bytes / 1e12:,.0f} TB that its disks are made for")
    return parts


def _bounds(plan: Plan, programs: Sequence[Program], hardware: Hardware) -> str:
    """Lower bounds: of any plan for this machine, and of any schedule of these stages."""
    timeline = simulate_here(programs, hardware, plan.precision)
    busiest: dict[str, float] = {}
    for (_, stream), share in timeline.busy_share.items():
        busiest[stream] = max(busiest.get(stream, 0.0), share * timeline.step_s)
    compute = busiest.get(ops.COMPUTE, 0.0)
    links = max(_busy_media(timeline, hardware).values(), default=0.0)
    floor = max(compute, links)
    lines = [
        f"no schedule of these stages is faster than its busiest device's computation, {format_seconds(compute)}, "
        f"or its busiest link, {format_seconds(links)}; this one takes {timeline.step_s / floor:.2f}x the larger"
    ]
    p = plan.predicted
    if p is not None and p.savings is not None:
        lines.append(
            f"with the kernels of PyTorch's calls and {plan.micro_batches} micro-batches no plan for this machine is "
            f"faster than {format_seconds(p.eager_bound_s)} ({p.eager_bound_by}), with fused kernels "
            f"{format_seconds(p.fused_bound_s)}, and with any {format_seconds(p.bound_s)} ({p.bound_by})"
        )
        lines.append(p.savings.text.replace(" of it", " of a step"))
    return "\n".join(line for text in lines for line in textwrap.wrap(text, WIDTH, subsequent_indent="  "))


def _busy_media(timeline: Timeline, hardware: Hardware) -> dict[str, float]:
    """The seconds that links are busy; links that take turns on one medium are added up."""
    busy: dict[str, float] = defaultdict(float)
    for name, link in hardware.links().items():
        busy[link.simplex or name] += timeline.link_busy.get(name, 0.0) * timeline.step_s
    return busy


def _helps(plan: Plan, helps: Sequence[Help]) -> str:
    assert plan.predicted is not None
    lines = ["what would help, each planned anew in a few variants:"]
    for help in helps:
        lines += _gain(help.change, help.step_s, plan.predicted.step_s, help.reason)
    return "\n".join(lines)


def _same_programs(plan: Plan, programs: Sequence[Program], hardware: Hardware) -> str:
    """The gains of these programs on faster parts: without the model nothing can be planned anew."""
    own_s = simulate_here(programs, hardware, plan.precision).step_s
    lines = ["what would help, with these programs as they are (planning anew needs the model):"]
    for change in changed_machines(hardware):
        if change.machine is not None and change.faster:
            lines += _gain(change.text, simulate_here(programs, change.machine, plan.precision).step_s, own_s)
    return "\n".join(lines)


def _gain(change: str, step_s: float | None, own_s: float, reason: str = "") -> Iterator[str]:
    if step_s is None:
        yield from _wrap(f"  {change:34} ", [reason])
    else:
        gain = 1 - step_s / own_s
        yield f"  {change:34} {format_seconds(step_s)} a step, {abs(gain):.0%} {'less' if gain > -0.005 else 'more'}"


def _wrap(begin: str, parts: Iterable[str]) -> list[str]:
    """Parts with commas between, in lines of at most `WIDTH`."""
    text = begin + ", ".join(parts)
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _notes(plan: Plan) -> str:
    if not plan.notes:
        return ""
    lines = ["remarks"]
    for name, note in plan.notes.items():
        text, *table = note.split("\n")  # such as the curve of choose-activations
        lines += [*_wrap(f"  {name}: ", [text]), *(f"    {row}" for row in table)]
    return "\n".join(lines)


def _rivals(plan: Plan) -> str:
    if not plan.rivals:
        return ""
    rows, alike = plan.distinct_rivals()
    lines = ["rivals"]
    for rival in rows:
        lines += _wrap(f"  {rival.name}: ", [rival.reason])
    lines += [f"  {alike} other candidates give a plan already listed"] if alike else []
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
