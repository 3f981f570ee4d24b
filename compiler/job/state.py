"""Moves what the devices hold to a state dict, the user's own model or a checkpoint, and from a checkpoint back.

In: a driver whose devices are up. Stages travel one at a time, so that this takes the memory of one stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import CheckpointError
from ...ir.program import Interface, StageSpec, whole_params
from ...runtime.model_names import named_tensors
from ...runtime.processes.commands import Tensors, add_kind, pack_state, unpack_state
from ...runtime.processes.driver import Driver
from ...runtime.quantised.model import give_back, names_of_bytes
from ...runtime.stage.store import StagePart, join_members, join_shards
from ...runtime.state import checkpoint
from ...runtime.state.base_identity import BaseIdentity, base_identity, frozen_params
from ...runtime.state.checkpoint import Checkpoint
from ...runtime.state.part_params import PartJoiner
from ...runtime.state.plain_json import encode
from ...runtime.state.rng_state import rng_state
from ...runtime.state.weights import WeightSource, weights_to_read

Held = tuple[StageSpec, dict[str, Tensor], dict[str, Tensor]]


def stage_states(driver: Driver, interface: Interface) -> Iterator[Held]:
    """One stage at a time: its spec, weights (fp32) and buffers. A parameter in parts comes with its last."""
    parts = PartJoiner()
    for stage in driver.setup.stage_devices:
        spec = interface.stages[stage]
        state = whole_state(driver, spec, with_optimizer=False)
        weights = parts.add(spec.params, state.weights)
        here = [param for param in whole_params(spec.params) if param.name in weights]
        yield dataclasses.replace(spec, params=tuple(here)), weights, state.buffers


def whole_state(driver: Driver, spec: StageSpec, with_optimizer: bool = True) -> StagePart:
    """The lasting state of a stage: the copy of its first device, or its devices' shards put together."""
    args = {"stage": spec.name, "optimizer": with_optimizer}
    if spec.name not in driver.setup.spread:
        return unpack_state(*driver.call("stage_state", driver.setup.stage_devices[spec.name], args))
    answers = [driver.call("stage_state", device, args) for device in driver.setup.spread[spec.name]]
    states = [unpack_state(*answer) for answer in answers]
    size = len(states) // len(
        driver.setup.stages_in_parts.get(spec.name, [0])
    )  # the shards of each member, one after another
    if size > 1:
        states = [join_shards(states[i : i + size], spec) for i in range(0, len(states), size)]
    return join_members(states, spec) if spec.name in driver.setup.stages_in_parts else states[0]


def state_dict_of(model: nn.Module, ties: Mapping[str, str], states: Iterable[Held]) -> dict[str, Tensor]:
    """Tensors by the keys of `model.state_dict()`. A tensor that no stage holds is the model's own, and left out if on
    meta."""
    found: dict[str, Tensor] = {}
    for _, weights, buffers in states:
        for name, tensor in (weights | buffers).items():
            found.setdefault(ties.get(name, name), tensor)
    for name in names_of_bytes(model):  # frozen, and the model's own has the type that its library knows
        found.pop(name, None)
    state = {}
    for name, own in model.state_dict().items():
        tensor = found.get(ties.get(name, name), own)
        if not tensor.is_meta:
            state[name] = tensor
    return state


def sync_model(model: nn.Module, ties: Mapping[str, str], states: Iterable[Held], source: WeightSource | None) -> None:
    """Copy the trained values into the model, in place; tensors on meta, and expanded ones, are replaced, tied ones by
    one tensor.

    A tensor that no stage holds stays as it is; on meta it comes from `source`. Weights that only files have packed
    have no place in the user's model, where they stay on meta.
    """
    packed = names_of_bytes(model, of_files=True)
    for _, weights, buffers in states:
        for name, tensor in (weights | buffers).items():
            if name not in packed:
                _assign(model, ties, name, tensor)
    if source is not None:
        empty = [name for name, tensor in named_tensors(model).items() if tensor.is_meta and name not in ties]
        for name in [name for name in empty if name not in packed]:
            _assign(model, ties, name, source.read(name))
    give_back(model)


def _assign(model: nn.Module, ties: Mapping[str, str], name: str, tensor: Tensor) -> None:
    old = _get(model, name)
    expanded = any(stride == 0 < size - 1 for size, stride in zip(old.shape, old.stride()))
    if not (old.is_meta or expanded):
        with torch.no_grad():
            old.copy_(tensor)
        return
    made: Tensor = tensor.to(tensor.device if old.is_meta else old.device, old.dtype, copy=True)
    if isinstance(old, nn.Parameter):
        made = nn.Parameter(made, requires_grad=old.requires_grad)
    canonical = ties.get(name, name)
    for path in {name, canonical, *(alias for alias, first in ties.items() if first == canonical)}:
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made)


def _get(model: nn.Module, name: str) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(owner), leaf)
    return found


def save_checkpoint(
    driver: Driver,
    interface: Interface,
    ties: Mapping[str, str],
    directory: str | Path,
    data: Mapping[str, Any],
    base: BaseIdentity | None,
) -> Path:
    """Every device writes its stages, device 0 the manifest. An older checkpoint stays until this one is complete.
    With `base`, the identity of the frozen weights, these are left out."""
    args = {"directory": str(directory), "need_bytes": bytes_on_disk(interface)}
    begun, _ = driver.call("begin_checkpoint", 0, args)
    temporary = begun["temporary"]
    try:
        shards: list[Any] = []
        groups: dict[str, Any] = {}
        schedulers: dict[str, Any] = {}
        for stage, device in driver.setup.stage_devices.items():
            args = {"stage": stage, "temporary": temporary, "ties": dict(ties), "with_frozen": base is None}
            tensors: Tensors = {}
            if stage in driver.setup.spread:
                header, tensors = pack_state(whole_state(driver, interface.stages[stage]))
                args |= {"given": header}
            answer, _ = driver.call("write_shard", device, args, tensors)
            shards.append(answer["record"])
            groups.update(answer["group"])
            schedulers.update(answer["scheduler"] or {})
        counters, _ = driver.call("counters", 0)
        progress = progress_of(counters, groups, schedulers, data)
        args = {
            "temporary": temporary,
            "directory": str(directory),
            "shards": shards,
            "progress": encode(progress, "checkpoint"),
            "ties": dict(ties),
            "base": None if base is None else dataclasses.asdict(base),
        }
        done, _ = driver.call("commit_checkpoint", 0, args)
        return Path(done["path"])
    except BaseException:
        if driver.is_main:  # a device that is gone could not tidy up
            checkpoint.abort(Path(temporary))
        raise


def bytes_on_disk(interface: Interface) -> int:
    """The least bytes that a checkpoint takes."""
    trained = sum(spec.trained_params for spec in interface.stages.values())
    return int((4 + interface.state_bytes_per_param) * trained)


def progress_of(
    counters: Mapping[str, Any], groups: Mapping[str, Any], schedulers: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, Any]:
    """The progress of a run, as a manifest has it; `counters` are the devices'."""
    return {
        "step": counters["step"],
        "seed": counters["seed"],
        "optimizer": dict(groups),
        "scheduler": dict(schedulers),
        "loss_scale": {"state": counters["loss_scale"]} if counters["loss_scale"] else {},
        "data": dict(data),
        "rng": rng_state(),
    }


def require_one_checkpoint(driver: Driver, found: Checkpoint) -> None:
    """Raise `CheckpointError` where ranks see different checkpoints under one name, as on disks that are not shared."""
    steps = driver.gather([found.progress.step, found.fingerprint])
    if len({tuple(row) for row in steps}) > 1:
        told = ", ".join(f"rank {rank} step {step}" for rank, (step, _) in enumerate(steps))
        raise CheckpointError(
            f"{found.path}: the ranks see different checkpoints of this name ({told}); it must be in a directory that "
            "all hosts share"
        )


def identity_of(model: nn.Module, interface: Interface, source: WeightSource, place: str | None) -> BaseIdentity | None:
    """The identity of the weights that no step changes; None if there are none. `place`: where they were read."""
    frozen = [param for spec in interface.stages.values() for param in frozen_params(spec.params)]
    config = getattr(model, "config", None)
    named = getattr(config, "_name_or_path", "") or getattr(config, "model_type", "") or type(model).__name__
    return base_identity(place or str(named), source, frozen) if frozen else None


def require_base(found: Checkpoint, base: BaseIdentity | None) -> None:
    """Raise `CheckpointError` where the checkpoint goes with other frozen weights than `base`."""
    if found.base is not None and (base is None or base.digest != found.base.digest):
        here = f"those of {base}" if base is not None else "none: all of its weights are trained"
        raise CheckpointError(
            f"{found.path}: holds what was trained on top of the frozen weights of {found.base}, and not these "
            f"themselves; the frozen weights of this job are {here}. Compile with the base that the checkpoint was "
            "trained on"
        )


def load_checkpoint(
    driver: Driver, interface: Interface, found: Checkpoint, directory: str | Path, source: WeightSource | None
) -> None:
    """Every device takes its stages and counters from the checkpoint, and from `source` the frozen weights that it does
    not hold. After an error they hold a mixture."""
    progress = found.progress
    for stage, devices in driver.setup.stage_holders.items():
        args = {
            "stage": stage,
            "directory": str(directory),
            "group": dict(progress.optimizer),
            "scheduler": dict(progress.scheduler) or None,
        }
        spec = interface.stages[stage]
        weights: Mapping[str, Tensor] = {}
        left_out = found.left_out(spec)
        if left_out:
            assert source is not None, "a checkpoint without its base was let pass"
            weights = weights_to_read(source, dataclasses.replace(spec, params=left_out))
        driver.call_holders("read_shard", devices, args, add_kind("weights", weights))
    counters = {"step": progress.step, "seed": progress.seed, "loss_scale": progress.loss_scale.get("state")}
    for device in range(interface.world_size):
        driver.call("load_counters", device, counters)
