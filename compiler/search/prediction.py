"""The chosen candidate as a plan: its decisions, what the simulator expects of it, and its rivals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...ir import ops
from ...ir.machine.hardware import Hardware
from ...ir.program import Program, profile_memory, shown, work_of
from ...passes.draft import Draft
from ...runtime.simulate import Timeline
from ..pipeline import pipeline_text
from ..plan import Decisions, Plan, Prediction
from .attempts import SearchResult
from .bounds import ideal_bounds, machine_bound
from .host_memory import host_needs


def make_plan(found: SearchResult, model: str, strategy: str) -> Plan:
    """The chosen candidate as a document."""
    best = found.best
    return Plan(
        model=model,
        hardware=best.draft.machine.name,
        strategy=strategy,
        passes=pipeline_text(best.candidate.passes),
        micro_batches=best.count,
        precision=best.draft.options.precision,
        gradient_dtype=best.draft.options.gradient_dtype,
        boundary_dtype=best.draft.options.boundary_dtype,
        max_grad_norm=best.draft.options.max_grad_norm,
        decisions=Decisions(**best.decisions),
        predicted=predict(best.draft, best.timeline),
        rivals=found.rivals,
        notes=dict(best.draft.notes),
    )


def predict(draft: Draft, timeline: Timeline) -> Prediction:
    programs, hardware = shown(draft.programs, draft.machine)
    name, share = timeline.bottleneck()
    eager, (fused_s, ideal) = machine_bound(draft), ideal_bounds(draft)
    needs = host_needs(programs, hardware)
    return Prediction(
        step_s=timeline.step_s,
        from_rest_s=timeline.from_rest_s,
        peak_bytes=dict(timeline.peak_bytes),
        budget_bytes={memory: hardware.budget_bytes(memory) for memory in timeline.peak_bytes},
        parts={need.memory: need.parts for need in needs},
        loading_bytes={need.memory: need.loading_bytes for need in needs if need.loading_bytes},
        copied_bytes=copied_bytes(programs, hardware),
        moved_bytes={link: moved for link, moved in timeline.moved_bytes.items() if moved},
        busy={
            f"{hardware.devices[d].name} {stream}": share for (d, stream), share in timeline.busy_share.items() if share
        },
        bottleneck=f"{name}, busy {share:.0%}",
        arena_bytes=[profile_memory(program).arena_bytes for program in programs],
        bound_s=ideal.seconds,
        bound_by=ideal.by,
        fused_bound_s=fused_s,
        eager_bound_s=eager.seconds,
        eager_bound_by=eager.by,
    )


def copied_bytes(programs: Sequence[Program], hardware: Hardware) -> dict[str, int]:
    """The bytes that a step copies inside each memory before updates that may be undone."""
    found: dict[str, int] = defaultdict(int)
    for program in programs:
        device = hardware.devices[program.device]
        for work in (work_of(program, node) for node in program.ops() if node.target is ops.step):
            memory = device.name if work.workspace_memory == ops.DEVICE else f"{work.workspace_memory}{device.host}"
            found[memory] += work.copied_bytes
    return {memory: num_bytes for memory, num_bytes in found.items() if num_bytes}
