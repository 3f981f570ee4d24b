"""The common facts of all programs' updates, and the time of a stage's update after its gradients were offloaded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...graph.opgraph import OpGraph
from ...ir.precision import Precision
from ...ir.program import WORLD
from ..draft import Draft

UNCLIPPED = 1e30  # a norm that no finite gradient reaches, where only the loss scale is to be taken out
TieGroup = tuple[tuple[int, str, str], ...]


@dataclass(frozen=True)
class Timing:
    """The number of later offloads before a stage's step (`lag`), and of buffers for states from SSD (`buffers`)."""

    lag: int
    buffers: int = 1


@dataclass(frozen=True)
class Updates:
    """The facts of updates that all programs of a draft share. `where`: per stage the memory of its states; `groups`:
    of tied parameters, and of the norm; `max_norm`: None where nothing is clipped; `scaled`: with a loss scale.

    `overlap`: stages are stepped while the backward of others runs; `speculative`: also before the norm is known,
    all of them or those in `early`.
    """

    where: Mapping[str, str]
    groups: dict[str, TieGroup] = field(default_factory=dict)
    max_norm: float | None = None
    scaled: bool = False
    overlap: bool = True
    speculative: bool = False
    early: frozenset[str] | None = None

    @property
    def tied_stages(self) -> set[str]:
        return {stage for rows in self.groups.values() for _, stage, _ in rows if stage}

    def is_late(self, stage: str) -> bool:
        """Whether a swapped stage's step waits for what is known only after the last backward."""
        if not self.overlap or stage in self.tied_stages:
            return True
        early = self.speculative and (self.early is None or stage in self.early)
        return self.max_norm is not None and not early


def updates_of(draft: Draft, where: Mapping[str, str]) -> Updates:
    """The updates that the user's options ask for."""
    scaled = Precision.of(draft.options.precision).scales_loss
    clip = draft.options.max_grad_norm
    max_norm = float(clip) if clip is not None else UNCLIPPED if scaled else None
    groups = tie_groups(draft)
    lanes = draft.mesh.shards * (draft.mesh.team if draft.graph.divided else 1)  # that have one copy of all weights
    if max_norm is not None and draft.lane_hardware.num_devices * lanes > 1:
        groups[WORLD] = tuple((device, "", "") for device in range(draft.lane_hardware.num_devices))
    return Updates(where, groups, max_norm, scaled)


def tie_groups(draft: Draft) -> dict[str, TieGroup]:
    """The members (device, stage, parameter name) of each group, for each trained parameter in several stages: all
    devices of each."""
    ties = draft.graph.once(OpGraph.ties)
    members: dict[str, list[tuple[int, str, str]]] = defaultdict(list)
    for stage, home in zip(draft.stages, draft.devices):
        for param in stage.spec.params:
            name = ties.get(param.name, param.name)
            if param.requires_grad:
                devices = draft.copies.get(stage.spec.name, [home])
                members[f"tie.{name}"] += [(device, stage.spec.name, param.name) for device in devices]
    return {group: tuple(rows) for group, rows in members.items() if len({stage for _, stage, _ in rows}) > 1}
