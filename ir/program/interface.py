"""What all programs of one plan share: its stages, batch, groups of devices and lanes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from .. import ops
from ..errors import BatchError
from ..precision import MASTER_BYTES
from .stage import PAGE, STATE_ROOM, ParamSpec, SavedSpec, StageSpec, TensorSpec, aligned


@dataclass(frozen=True)
class Interface:
    """What all programs of one plan share and their texts refer to by name.

    `groups` has the members of each group by its name: (device, stage, parameter name), reduced together. A member
    without a parameter name takes part with the whole value, one without a stage with any stage; "world" is every
    device.
    `lanes` has the machine's devices of each lane, in the order of the programs (see `lanes.py`); `num_devices` and
    `micro_batches` are then those of one lane. The groups `SHARDS` and `REPLICAS` join devices of different lanes and
    have no rows. Every `shards` consecutive lanes share each stage's weights.
    `state_bytes_per_param` is the size of the optimizer states of one trained parameter; `states` has the bytes of each
    stage for which that depends on the shapes of its parameters. `master`: fp32 copies exist beside the weights.
    `asynchronous`: every micro-batch is a mini-batch, with one update of each stage.
    """

    stages: dict[str, StageSpec]
    batch: dict[str, TensorSpec]  # of one micro-batch
    num_devices: int = 1
    micro_batches: int = 1
    groups: dict[str, tuple[tuple[int, str, str], ...]] = field(default_factory=dict)
    state_bytes_per_param: float = 8.0
    master: bool = False
    states: dict[str, int] = field(default_factory=dict)
    lanes: tuple[tuple[int, ...], ...] = ()
    shards: int = 1
    asynchronous: bool = False

    @property
    def replicas(self) -> int:
        return len(self.lanes) // self.shards if self.lanes else 1

    @property
    def total_micro_batches(self) -> int:
        """The micro-batches of all lanes together."""
        return self.micro_batches * max(1, len(self.lanes))

    @property
    def world_size(self) -> int:
        """Devices of the machine that take part."""
        return self.num_devices * max(1, len(self.lanes))

    def size(self, group: str) -> int:
        """The number of devices in a group."""
        if self.lanes and group in ops.MESH_GROUPS:
            return self.shards if group == ops.SHARDS else self.replicas
        return len(self.members(group))

    def state_bytes(self, spec: StageSpec) -> int:
        """Bytes of a stage's optimizer states."""
        return self.states.get(spec.name, int(self.state_bytes_per_param * spec.trained_params))

    def master_bytes(self, spec: StageSpec) -> int:
        """Bytes of a stage's fp32 masters; 0 if there are none."""
        return MASTER_BYTES * spec.trained_params if self.master else 0

    def optimizer_bytes(self, spec: StageSpec) -> int:
        """Bytes that the optimizer keeps of a stage: masters and states."""
        return self.master_bytes(spec) + self.state_bytes(spec)

    def states_bytes(self, spec: StageSpec) -> int:
        """Bytes of a buffer for a stage's masters and states, with room to align those of each parameter."""
        trained = [p for p in spec.params if p.requires_grad]
        return aligned(self.optimizer_bytes(spec) + STATE_ROOM * len(trained), PAGE) if trained else 0

    def all_bytes(self, spec: StageSpec) -> int:
        """Bytes of a buffer for a stage's weights and, after them, its masters and states."""
        return aligned(spec.weight_bytes, PAGE) + self.states_bytes(spec)

    def masters_say_all(self, spec: StageSpec) -> bool:
        """Whether all weights follow from masters; a frozen parameter has no master, so its weight must be read."""
        return self.master and all(param.requires_grad for param in spec.params)

    def members(self, group: str) -> list[int]:
        """The devices of a group, each once, in its order."""
        return list(dict.fromkeys(device for device, _, _ in self.groups[group]))

    def part_of(self, stage: str, group: str) -> StageSpec:
        """The stage as a member of the group keeps it: whole if there is no group, else a shard."""
        spec = self.stages[stage]
        return spec.shard(self.size(group)) if group else spec

    def check_batch(self, batch: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Raises `BatchError` where an input among `names` is missing or is not what was compiled."""
        for name in names:
            want, found = self.batch[name], batch.get(name)
            shape = (want.shape[0] * self.micro_batches, *want.shape[1:])
            if found is None:
                raise BatchError(f"batch: {name!r} is missing; found {', '.join(batch) or 'nothing'}")
            dtype = str(found.dtype).removeprefix("torch.")
            if (tuple(found.shape), dtype) != (shape, want.dtype):
                raise BatchError(
                    f"batch: {name!r} is {dtype}{list(found.shape)}, compiled for {want.dtype}{list(shape)}"
                )

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Interface:
        raw = json.loads(text)

        def tensors(rows: list[dict[str, Any]]) -> tuple[TensorSpec, ...]:
            return tuple(TensorSpec(**{**row, "shape": tuple(row["shape"])}) for row in rows)

        def params(rows: list[dict[str, Any]]) -> tuple[ParamSpec, ...]:
            return tuple(ParamSpec(**{**row, "shape": tuple(row["shape"])}) for row in rows)

        for stage in raw["stages"].values():
            for key in ("inputs", "outputs", "extra_outputs"):
                stage[key] = tensors(stage[key])
            for key in ("params", "buffers"):
                stage[key] = params(stage[key])
            for key in ("seconds", "taking"):
                stage[key] = tuple((name, *parts) for name, *parts in stage[key])
            stage["saved"] = tuple(SavedSpec(**{**row, "calls": tuple(row["calls"])}) for row in stage["saved"])
        raw["stages"] = {name: StageSpec(**stage) for name, stage in raw["stages"].items()}
        raw["batch"] = {name: tensors([row])[0] for name, row in raw["batch"].items()}
        raw["lanes"] = tuple(tuple(lane) for lane in raw["lanes"])
        raw["groups"] = {name: tuple((d, s, p) for d, s, p in rows) for name, rows in raw["groups"].items()}
        return Interface(**raw)
