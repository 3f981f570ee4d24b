"""Trained parameters of a mostly frozen stage, adapters most of all, stay on its device, whatever the rest's memory.

In: stages on devices. Out: stages whose trained parameters are marked (`ParamSpec.stays`), after those that a fetch
brings. Their gradients, masters and optimizer states then are on the device, where they are stepped, so that of such a
stage frozen weights move, and nothing goes back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from ..ir.program import StageSpec, aligned
from .draft import Draft
from .optimizer.timing import tie_groups

FROZEN = 4  # the least ratio of frozen bytes to those that trained parameters would keep on the device
SHARE = 1 / 8  # of a device's memory that all of its stages' trained parameters may take together


def staying_stages(draft: Draft) -> list[StageSpec]:
    """The specs of all stages; of those for which it is worth it, with the trained parameters marked. Of a device whose
    stages would together take more than `SHARE`, none is."""
    specs = [stage.spec for stage in draft.stages]
    if draft.mesh.shards > 1:
        return specs
    tied = {stage for rows in tie_groups(draft).values() for _, stage, _ in rows}
    taken: dict[int, int] = defaultdict(int)
    able = set()
    for spec, device in zip(specs, draft.devices):
        own = kept_bytes(draft, spec)
        frozen = sum(param.bytes for param in spec.params if not param.requires_grad)
        if own and frozen >= FROZEN * own and spec.name not in tied and not any(p.change for p in spec.params):
            able.add(spec.name)
            taken[device] += own
    devices = draft.lane_hardware.devices
    roomy = {d for d, num_bytes in taken.items() if num_bytes <= SHARE * devices[d].budget_bytes}
    return [_mark(s) if s.name in able and d in roomy else s for s, d in zip(specs, draft.devices)]


def kept_bytes(draft: Draft, spec: StageSpec) -> int:
    """Bytes that a stage's trained parameters keep on a device: weights, gradients, masters and states."""
    trained = [param for param in spec.params if param.requires_grad]
    weights = sum(aligned(param.bytes) for param in trained)
    return weights + spec.grad_bytes + draft.options.optimizer_bytes(trained)


def _mark(spec: StageSpec) -> StageSpec:
    frozen = [param for param in spec.params if not param.requires_grad]
    return replace(spec, params=(*frozen, *(replace(p, stays=True) for p in spec.params if p.requires_grad)))
