"""Weights that files have packed in a form of `runtime/quantised/formats`: where each tensor of a weight is.

Files say which weights are packed: a weight is where its packed tensors, or a weight of their type, are there. A frozen
one of a layer that can multiply by it stays packed; any other is unpacked while it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...ir.documents import Unreadable, read_json
from ...ir.errors import CheckpointError
from ..quantised.formats.table import format_of
from ..quantised.linear_packed import Packing
from ..quantised.packed import key_of
from ..quantised.raw_bytes import as_bytes
from .stored import Converted, Stored, dtype_of

CONFIG_FILE = "config.json"
LIBRARIES = ("bitsandbytes", "torchao")  # whose layers the model has itself
Found = Mapping[str, Stored | Converted]


@dataclass(frozen=True)
class PackedPlaces:
    """The packed form of a weight, and the places of its tensors in files by their names for a parameter "weight".
    `is_transposed`: the model has its matrices the other way round."""

    packing: Packing
    key: str  # of the weight
    places: Mapping[str, Stored | Converted]
    is_transposed: bool = False

    @property
    def unneeded(self) -> set[str]:
        return {key_of(self.key, name) for name in self.packing.record.unneeded}

    def require(self) -> PackedPlaces:
        """The same. Raises `CheckpointError` where a tensor is missing, or of another shape or type than the layout of
        config.json has."""
        for name, (shape, dtype) in self.packing.types.items():
            key, place = key_of(self.key, name), self.places.get(name)
            if place is None:
                raise CheckpointError(
                    f"{self.key!r} is packed as {self.packing.form} in these files, but {key!r} is missing: they are "
                    f"cut off, or not of the layout that quantization_config in {CONFIG_FILE} has"
                )
            if (place.shape or (1,), dtype_of(place)) != (shape, dtype):
                found, wanted = (_words(*pair) for pair in ((place.shape, dtype_of(place)), (shape, dtype)))
                raise CheckpointError(
                    f"{key!r} is {found} in these files; with the quantization_config in {CONFIG_FILE} "
                    f"({_options(self.packing)}) a weight of shape {list(self.packing.shape)} has {wanted}"
                )
        return self


@dataclass(frozen=True)
class UnpackedOnRead:
    """A weight that is packed in files and whole in the model."""

    found: PackedPlaces
    shape: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for place in self.found.places.values() for key in place.keys)

    def read(self) -> Tensor:
        packing = self.found.packing
        return self._unpack(packing, [self.found.places[name].read() for name in packing.types])

    def read_rows(self, begin: int, end: int) -> Tensor:
        """Of experts only those that are asked for are unpacked."""
        if len(self.shape) < 3:
            return self.read()[begin:end].clone()
        packing = replace(self.found.packing, shape=(end - begin, *self.found.packing.shape[1:]))
        return self._unpack(packing, [self.found.places[name].read_rows(begin, end) for name in packing.types])

    def _unpack(self, packing: Packing, parts: Sequence[Tensor]) -> Tensor:
        found = packing.unpack([as_bytes(part) for part in parts], packing.dtype)
        return found.transpose(-2, -1).contiguous() if self.found.is_transposed else found


def quantization_config(directory: Path) -> dict[str, Any]:
    """That of transformers' configuration beside weights; empty for none."""
    try:
        config = read_json(directory / CONFIG_FILE) if (directory / CONFIG_FILE).is_file() else {}
    except Unreadable:
        return {}
    how = config.get("quantization_config") if isinstance(config, dict) else None
    if how is None and isinstance(config, dict):
        how = config.get("compression_config")  # of older files of compressed-tensors
    return how if isinstance(how, dict) else {}


def find_packed(
    config: Mapping[str, Any], key: str, param: Tensor, found: Found, is_transposed: bool
) -> PackedPlaces | None:
    """The packed form of a parameter whose name in files is `key`; None where files do not have it packed. Raises
    `CheckpointError` for a method that is not read here."""
    if config.get("quant_method") in LIBRARIES or param.dim() not in (2, 3):
        return None
    chosen = format_of(config, key.rpartition(".")[0] if param.dim() == 2 else key)
    if chosen is None:
        return None
    shape = tuple(param.transpose(-2, -1).shape if is_transposed else param.shape)
    record, options = chosen
    names = list(record.types(shape[-2:], options))
    there = {name: found[key_of(key, name)] for name in names if key_of(key, name) in found}
    plain = there.get("weight")
    if plain is not None and dtype_of(plain).is_floating_point and dtype_of(plain).itemsize > 1:
        return None
    if not there:
        return None
    if record.scale in there:
        options["scale"] = dtype_of(there[record.scale])
    return PackedPlaces(Packing(record.name, shape, param.dtype, options), key, there, is_transposed)


def _words(shape: Collection[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {list(shape)}"


def _options(packing: Packing) -> str:
    known = {name: value for name, value in packing.options.items() if not isinstance(value, torch.dtype)}
    return ", ".join([packing.form, *(f"{name}={value}" for name, value in known.items())])
