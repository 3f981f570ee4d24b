"""Trained parameters of a mostly frozen stage, adapters most of all, may stay on the device while the rest moves.

In: stages on devices. Out: the names of the stages for which that is worth it, which a schedule decides; and stages
whose trained parameters are marked (`ParamSpec.stays`), after those that a fetch brings. Their gradients, masters and
optimizer states then are on the device, where they are stepped, so that of such a stage frozen weights move, and
nothing goes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from ..ir.errors import PassError
from ..ir.program import StageSpec, aligned
from .draft import Draft
from .optimizer.timing import tie_groups

FROZEN = 4  # the least ratio of frozen bytes to those that trained parameters would keep on the device
SHARE = 1 / 8  # of a device's memory that all of its stages' trained parameters may take together


def choose_staying(draft: Draft) -> list[str]:
    """The names of the stages whose trained parameters stay: of each device, of all that are mostly frozen, or of none
    where these would together take more than `SHARE` of it."""
    able, worth, taken = able_to_stay(draft), dict[str, int](), defaultdict[int, int](int)
    for stage, device in zip(draft.stages, draft.devices):
        own = kept_bytes(draft, stage.spec)
        if stage.spec.name in able and _frozen_bytes(stage.spec) >= FROZEN * own:
            worth[stage.spec.name] = device
            taken[device] += own
    devices = draft.lane_hardware.devices
    return [name for name, d in worth.items() if taken[d] <= SHARE * devices[d].budget_bytes]


def able_to_stay(draft: Draft) -> list[str]:
    """The names of the stages whose trained parameters may stay: these have frozen ones beside them, and no other lane
    or stage has them."""
    tied = {stage for rows in tie_groups(draft).values() for _, stage, _ in rows}
    specs = [stage.spec for stage in draft.stages if draft.mesh.shards == 1 and stage.spec.name not in tied]
    mixed = (spec for spec in specs if spec.trained_params and _frozen_bytes(spec))
    return [spec.name for spec in mixed if not any(param.change for param in spec.params)]


def mark_staying(draft: Draft, names: Collection[str]) -> list[StageSpec]:
    """The specs of all stages, with the trained parameters of the named ones marked. Raises `PassError` for a stage
    whose parameters cannot stay."""
    able = able_to_stay(draft) if names else []
    for name in names:
        if name not in able:
            raise PassError(f"staying names {name!r}; the stages able to are {', '.join(able) or 'none'}")
    return [_mark(stage.spec) if stage.spec.name in names else stage.spec for stage in draft.stages]


def kept_bytes(draft: Draft, spec: StageSpec) -> int:
    """Bytes that a stage's trained parameters keep on a device: weights, gradients, masters and states."""
    trained = [param for param in spec.params if param.requires_grad]
    weights = sum(aligned(param.bytes) for param in trained)
    return weights + spec.grad_bytes + draft.options.optimizer_bytes(trained)


def _frozen_bytes(spec: StageSpec) -> int:
    return sum(param.bytes for param in spec.params if not param.requires_grad)


def _mark(spec: StageSpec) -> StageSpec:
    frozen = [param for param in spec.params if not param.requires_grad]
    return replace(spec, params=(*frozen, *(replace(p, stays=True) for p in spec.params if p.requires_grad)))
