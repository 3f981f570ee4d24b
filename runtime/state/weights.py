"""The sources of initial weights: a live model, a directory of safetensors, or the model's own initialisers.

Every source answers `read(name)` for one tensor, under the user's dotted name, so that weights are loaded stage by
stage and are never in memory twice. `stage_weights` and `stage_buffers` collect the tensors of one stage.
"""

from __future__ import annotations

import fnmatch
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...ir.errors import CheckpointError, PlanError
from ...ir.precision import MASTER_BYTES
from ...ir.program import ParamSpec, RowPart, StageSpec
from ..model_names import named_tensors, ties_of, unsaved_buffers
from ..quantised.linear_packed import Packing
from ..quantised.model import names_of_bytes, with_bytes
from ..ssd.extents import FileRange
from .fresh import FreshValues
from .quantised import StoredBytes, quantised_layers
from .stored import Stored, dtype_of, refuse_nan
from .tensor_file import Reads
from .weight_files import Place, match_names, open_files, packed_weights, require_kinds
from .wrapped import ModelPart

WHOLE_BYTES = 2 * MASTER_BYTES  # of the weights that are packed in one byte, two at most


class WeightSource(ABC):
    """Initial values of parameters and buffers by name. `ties` maps each tied name to its canonical name."""

    ties: Mapping[str, str]

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """The tensor in its stored dtype. If `is_shared(name)`, the caller must not write to it."""

    def read_rows(self, part: RowPart) -> Tensor:
        """A part of a tensor; shared with the source where the tensor is."""
        return self.read(part.parameter)[part.rows]

    def is_shared(self, name: str) -> bool:
        """Whether `read` returns storage that the source continues to use."""
        return False

    def range_of(self, param: ParamSpec) -> FileRange | None:
        """The bytes of a file that are those of a parameter as programs compute with it; None if there are none."""
        return None


class LiveWeights(WeightSource):
    """A model whose weights are in memory: its own tensors, not copied."""

    def __init__(self, model: nn.Module):
        self._tensors = {name: tensor.detach() for name, tensor in named_tensors(model).items()}
        self.ties = ties_of(model)

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if tensor.is_meta:
            raise PlanError(
                f"model: {name!r} is on the meta device, which has no values. Name the directory its weights are in, "
                "or construct the model on CPU."
            )
        return tensor

    def is_shared(self, name: str) -> bool:
        return True


class PartWeights(WeightSource):
    """The weights of a part of a model, under its own names."""

    def __init__(self, whole: WeightSource, part: ModelPart):
        self._whole = whole
        self._names = {inner: outer for outer, inner in reversed(part.names.items())}
        self.ties = ties_of(part.module)

    def read(self, name: str) -> Tensor:
        return self._whole.read(self._names[name])

    def is_shared(self, name: str) -> bool:
        return self._whole.is_shared(self._names[name])

    def range_of(self, param: ParamSpec) -> FileRange | None:
        return self._whole.range_of(replace(param, name=self._names[param.name]))


@dataclass(frozen=True)
class DirectoryWeights(WeightSource):
    """Safetensors files of a directory, each tensor read when it is asked for. Made by `open_directory`; pickles.

    `where` has the place of each name in the files; `held` has the values of names that no file has. The values of
    `fresh_names` come from the model's initialiser. `unexpected_keys` are keys in the files that no name uses.
    """

    where: Mapping[str, Place]
    ties: Mapping[str, str]
    held: Mapping[str, Tensor] = field(default_factory=dict)
    fresh_names: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()

    def read(self, name: str) -> Tensor:
        """Raises `CheckpointError` for a tensor of a file that has NaN in it."""
        return self.held[name] if name in self.held else refuse_nan(self.where[name].read(), self.where[name].keys)

    def read_rows(self, part: RowPart) -> Tensor:
        stored = self.where.get(part.parameter)
        if stored is None:
            return super().read_rows(part)
        return refuse_nan(stored.read_rows(part.begin, part.end), stored.keys)

    def is_shared(self, name: str) -> bool:
        return name in self.held

    def range_of(self, param: ParamSpec) -> FileRange | None:
        place = self.where.get(param.name)
        stored = place.stored if isinstance(place, StoredBytes) and not place.field else place
        if not isinstance(stored, Stored) or (stored is place and dtype_of(stored) != getattr(torch, param.dtype)):
            return None
        entry = stored.file.entries[stored.key]
        found = FileRange(str(stored.file.path.resolve()), entry.begin, entry.end - entry.begin)
        return found if found.num_bytes == param.bytes else None


def with_bytes_of(model: nn.Module, directory: str | os.PathLike[str] | None) -> tuple[nn.Module, str]:
    """The model with bytes in place of quantised weights: those of its own layers, and those of plain layers on the
    meta device that the files of a directory have packed. Quantised layers on the meta device take from the files what
    these alone know. The text says which packed weights become whole; "" where none do.

    Raises `CheckpointError` where the files' layers are quantised in another way, or not there as a whole.
    """
    if directory is None:
        return with_bytes(model), ""
    packings = {name: found.packing for name, found in packed_weights(model, Path(directory)).items()}
    twin = with_bytes(model, packings)
    if any(p.is_meta for _, layer in quantised_layers(twin) for p in layer.parameters()):
        match_names(twin, open_files(Path(directory)), None)
    whole = packings.keys() - names_of_bytes(twin)
    return twin, _unpacked_note({name: p for name, p in twin.named_parameters() if name in whole}, packings)


def _unpacked_note(whole: Mapping[str, nn.Parameter], packings: Mapping[str, Packing]) -> str:
    if not whole:
        return ""
    largest = max(whole, key=lambda name: whole[name].numel())
    trained = sum(param.requires_grad for param in whole.values())
    reasons = [f"{trained} ask for a gradient"] if trained else []
    if trained < len(whole):
        reasons.append(f"{len(whole) - trained} are in memory, or of layers that multiply by whole weights only")
    dtype = str(whole[largest].dtype).removeprefix("torch.")
    return (
        f"{len(whole)} weights that are packed in the files ({packings[largest].form}) are unpacked while they are "
        f"read, stage by stage, into {dtype}: {' and '.join(reasons)}. The largest is {largest} "
        f"{list(whole[largest].shape)}"
    )


def open_directory(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    prefix: str | None = None,
    missing_ok: bool | Collection[str] = (),
    seed: int = 0,
) -> DirectoryWeights:
    """Open the weights in `directory` (model.safetensors, or shards with their index) under the names of `model`.

    The files may be of the model, of the one library model that it wraps, with or without adapters of PEFT around its
    layers, or of the one module in it that has their names. `model` gives names, shapes and ties; it may be on the meta
    device. Names in the files may lack a prefix that the model's names have, or have one more: `prefix` names it
    ("bert."), "" forbids it, None takes `model.base_model_prefix` if more names agree with it than without.
    `missing_ok` is True, or patterns of the names that may be absent, such as "classifier.*"; these keep their values,
    or on meta get those of the model's own initialiser, drawn from `seed`. Buffers that are never saved (rotary
    frequencies, position ids) are the model's own, or initialised likewise if they are on meta.

    Raises `CheckpointError` naming the damaged file, or all keys that are missing, misshapen and unexpected;
    `PlanError` for a tensor on meta whose value cannot be found.
    """
    match = match_names(model, open_files(Path(directory)), prefix)
    patterns = ["*"] if missing_ok is True else missing_ok or ()
    allowed = {name for name in match.missing if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
    refused = [name for name in match.missing if name not in allowed or not match.where]
    require_kinds(Path(directory), model, match)
    if refused or match.misshapen:
        raise match.error(Path(directory), refused)
    fresh, ties, tensors = FreshValues(model, seed), ties_of(model), named_tensors(model)
    held = {name: tensors[name].detach() for name in match.missing if not tensors[name].is_meta}
    held |= {name: fresh.value(name) for name in match.missing if name not in ties and name not in held}
    held |= {name: held[ties[name]] for name in match.missing if name in ties}
    for name in unsaved_buffers(model):
        held[name] = fresh.value(name) if tensors[name].is_meta else tensors[name].detach()
    return DirectoryWeights(match.where, ties, held, tuple(match.missing), tuple(match.unexpected))


def stage_weights(source: WeightSource, spec: StageSpec, *, own: bool = True) -> dict[str, Tensor]:
    """The stage's parameters, on the device of the source: those that are trained as masters, at least fp32, those that
    are frozen in the type that they compute in.

    Tied names share one tensor. With `own` (default) no tensor is shared with the source, so the caller may write to
    them; without it, a live model's tensors of the right type are returned as they are.
    """
    found: dict[str, Tensor] = {}
    later = weights_to_read(source, spec, own=own)
    homes = {param.name: source.ties.get(param.name, param.name) for param in spec.params}
    for name, home in homes.items():
        if home not in found:
            found[home] = later[name]
    return {name: found[home] for name, home in homes.items()}


def weights_to_read(source: WeightSource, spec: StageSpec, *, own: bool = False) -> Mapping[str, Tensor]:
    """As `stage_weights`, but each is read, and quantised, when it is asked for."""
    params = {param.name: param for param in spec.params}
    trained = {source.ties.get(name, name) for name, param in params.items() if param.requires_grad}

    def read(name: str) -> Tensor:
        param, stored = params[name], _read(source, params[name])
        dtype = _loaded_dtype(stored, param, source.ties.get(name, name) in trained)
        return stored.to(dtype, copy=own and source.is_shared(param.whole_name))

    return Reads(params, read)


def frozen_in_files(source: WeightSource, spec: StageSpec) -> dict[str, FileRange]:
    """The bytes of files that are those of frozen weights of a stage, each whole, as programs compute with it."""
    frozen = (param for param in spec.params if param.part is None and not param.requires_grad)
    found = {param.name: source.range_of(param) for param in frozen}
    return {name: each for name, each in found.items() if each is not None}


def _loaded_dtype(stored: Tensor, param: ParamSpec, trained: bool) -> torch.dtype:
    if not stored.is_floating_point():
        return stored.dtype
    return torch.promote_types(stored.dtype, torch.float32) if trained else getattr(torch, param.dtype)


def loaded_bytes(spec: StageSpec) -> int:
    """Bytes of what `stage_weights` returns, at most."""
    return sum(MASTER_BYTES * param.numel if param.requires_grad else param.bytes for param in spec.params)


def reading_bytes(spec: StageSpec) -> int:
    """Bytes that `stage_weights` takes beside what it returns, at most: one frozen tensor as files have it, in fp32, or
    not quantised yet."""
    frozen = (param for param in spec.params if not param.requires_grad)
    return max((param.numel * (WHOLE_BYTES if param.dtype == "uint8" else MASTER_BYTES) for param in frozen), default=0)


def stage_buffers(source: WeightSource, spec: StageSpec) -> dict[str, Tensor]:
    """The model's buffers in the stage, in the dtypes that it computes with; the caller may write to them."""
    result = {}
    for buffer in spec.model_buffers:
        dtype = getattr(torch, buffer.dtype)
        result[buffer.name] = _read(source, buffer).to(dtype, copy=source.is_shared(buffer.name))
    return result


def _read(source: WeightSource, wanted: ParamSpec) -> Tensor:
    part = wanted.part if isinstance(wanted.part, RowPart) else None
    stored = source.read(wanted.whole_name) if part is None else source.read_rows(part)
    shape = wanted.shape if part is not None else wanted.whole.shape  # a member takes its part of the whole itself
    if tuple(stored.shape) != shape:
        raise CheckpointError(
            f"{wanted.name!r} has shape {list(stored.shape)} in the weights, but {list(shape)} in the plan. "
            "Compile for the model that the weights are of."
        )
    return stored
