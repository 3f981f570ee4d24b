"""Quantised weights in files: packed already, or whole weights that are packed while they are read.

In: a model with `QuantisedLinear` in it, and the tensors of files. Out: what stands for each of a layer's tensors. A
whole weight is read and packed a few rows at a time.

Of plain layers the files say which weights are packed: a weight is where its packed tensors, or a weight of their type,
are there. A frozen one of a layer that can multiply by it stays packed; any other is unpacked while it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.documents import Unreadable, read_json
from ...ir.errors import CheckpointError
from ..quantised.formats.table import format_of
from ..quantised.layers import Linear4bitBytes, LinearTorchaoBytes, QuantisedLinear
from ..quantised.linear_packed import Packing
from ..quantised.packed import PackedLinear, key_of
from ..quantised.quantisers import Quantiser4bit, Quantiser8bit, ReadRows
from ..quantised.raw_bytes import as_bytes
from .stored import Converted, Stored, dtype_of, refuse_nan

STATE = ".quant_state.bitsandbytes__"
OFFSET = "nested_offset"
UNNEEDED = ("weight.quant_map", "weight_format")  # of a layer: what its other tensors say, too
MOST_WHOLE = 0.25  # of a quantised model's frozen weights, such as embeddings and heads, without a word about it
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
    def extras(self) -> set[str]:
        return {key_of(self.key, name) for name in self.packing.record.extras}

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
        self._require_whole_blocks()
        return self

    def _require_whole_blocks(self) -> None:
        """Raise `CheckpointError` where a matrix is joined or cut inside of a block of rows."""
        weight, step = next(iter(self.places.values())), self.packing.record.row_step(self.packing.options)
        for _, stored in weight.rows if isinstance(weight, Converted) else ():
            own, whole = stored.shape[-2], weight.shape[-2]
            if own != whole and (own % step or whole % step):
                raise CheckpointError(
                    f"{self.key!r} has {whole} rows, and {stored.key!r} in these files {own}, which are no multiples "
                    f"of the {step} rows of a block of {self.packing.form}: give weights that are not quantised"
                )


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


def packing_in_files(
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


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of one tensor of a file, or of a number that its description of the format has."""

    stored: Stored | Converted
    field: str = ""  # of the description; the tensor itself without one

    @property
    def shape(self) -> tuple[int, ...]:
        if self.field:
            return (4,)
        *outer, last = self.stored.shape or (1,)
        return (*outer, last * dtype_of(self.stored).itemsize)

    @property
    def keys(self) -> tuple[str, ...]:
        return self.stored.keys

    def read(self) -> Tensor:
        """Raises `CheckpointError` for scales with NaN in them."""
        found = torch.tensor(_quantisation(self.stored)[self.field]) if self.field else self.stored.read()
        is_scale = found.is_floating_point() and found.dtype.itemsize > 1
        return as_bytes(refuse_nan(found, self.keys) if is_scale else found)

    def read_rows(self, begin: int, end: int) -> Tensor:
        return self.read()[begin:end].clone()


@dataclass
class QuantisingRead:
    """A whole weight in a file, and what packs it. Holds what was packed until each tensor was asked for once."""

    stored: Stored | Converted
    quantiser: Quantiser4bit | Quantiser8bit
    shape: tuple[int, ...]  # as it is quantised
    packed: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str) -> Tensor:
        """Raises `CheckpointError` for a weight that has NaN in it."""
        if name not in self.packed:
            read = self._read_rows()
            self.packed = self.quantiser.quantise(
                lambda begin, end: refuse_nan(read(begin, end), self.stored.keys), self.shape
            )
        return self.packed.pop(name)

    def _read_rows(self) -> ReadRows:
        """Reads rows of the weight, a few at a time where its file has them one after another."""
        if isinstance(self.stored, Stored) and not self.quantiser.is_transposed:
            return self.stored.read_rows
        whole = self.stored.read().T if self.quantiser.is_transposed else self.stored.read()
        return lambda begin, end: whole[begin:end]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "packed": {}}


@dataclass(frozen=True)
class QuantisedOnRead:
    """One of the tensors that a library makes of a whole weight."""

    reading: QuantisingRead
    name: str
    shape: tuple[int, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        return self.reading.stored.keys

    def read(self) -> Tensor:
        return self.reading.take(self.name)

    def read_rows(self, begin: int, end: int) -> Tensor:
        return self.read()[begin:end].clone()


def unquantised_note(model: nn.Module) -> str:
    """The share of frozen weights that a quantised model keeps whole, in words; "" where it is small. Libraries
    quantise linear layers alone, not the stacked weights of experts."""
    packed = sum(math.prod(layer.shape) for _, layer in quantised_layers(model))
    whole = {name: p for name, p in model.named_parameters() if p.is_floating_point() and not p.requires_grad}
    num = sum(p.numel() for p in whole.values())
    if not packed or num <= MOST_WHOLE * (num + packed):
        return ""
    largest = max(whole, key=lambda name: whole[name].numel())
    return (
        f"{num / (num + packed):.0%} of the frozen weights stay as they are, as only linear layers are quantised: the "
        f"largest is {largest} {list(whole[largest].shape)}"
    )


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantisedLinear):
            yield path, module


def places_in_files(layer: QuantisedLinear, front: str, found: Found) -> dict[str, StoredBytes | QuantisedOnRead]:
    """The place of each tensor of a layer, by the name of its parameter; empty where the files do not have the layer.
    `front`: its name in the files, with a dot. A layer on the meta device takes the type that its weight was, or will
    be, quantised from.

    Raises `CheckpointError` for a layer that is not there as a whole, or is quantised otherwise than the model's.
    """
    if isinstance(layer, PackedLinear):
        key = layer.file_key(front, "weight")
        keys = {name: layer.file_key(front, name) for name in layer.types}
        there = {name: found[own] for name, own in keys.items() if own in found}
        places = PackedPlaces(layer.packing, key, there).require().places if there else {}
        return {name: StoredBytes(place) for name, place in places.items()}
    if isinstance(layer, LinearTorchaoBytes):
        packed = {name: found.get(f"{front}_{name}") for name in layer.types}
    elif isinstance(layer, Linear4bitBytes):
        state = next((stored for key, stored in found.items() if key.startswith(f"{front}weight{STATE}")), None)
        packed = {name: found.get(f"{front}weight.{name}") for name in layer.types if name not in ("weight", OFFSET)}
        packed |= {"state": state} | ({OFFSET: state} if OFFSET in layer.types else {})
        if any(packed.values()):
            packed["weight"] = found.get(f"{front}weight")
    else:
        packed = {"SCB": found.get(f"{front}SCB")}
        if any(packed.values()):
            packed["weight"] = found.get(f"{front}weight")
    if any(packed.values()):
        return _packed_already(layer, front, packed)
    whole = found.get(f"{front}weight")
    if whole is None:
        return {}
    if isinstance(layer, Linear4bitBytes) and layer.weight.is_meta:
        layer.dtype = dtype_of(whole)  # as from_pretrained takes it
    quantiser = layer.quantiser()
    if quantiser is None:
        raise CheckpointError(
            f"{front}weight is not quantised in these files, but by torchao in the model: give weights that torchao "
            "has quantised (save_pretrained of such a model), or the model loaded, instead of one on the meta device"
        )
    shape = layer.shape[::-1] if quantiser.is_transposed else layer.shape
    dtype = dtype_of(whole)
    if whole.shape != shape or not dtype.is_floating_point or dtype.itemsize == 1:  # floats of 8 bits have scales
        raise CheckpointError(
            f"{front}weight has shape {list(whole.shape)} and type {str(dtype)[6:]} in these files; the "
            f"model quantises weights of shape {list(shape)} that are not quantised yet"
        )
    reading = QuantisingRead(whole, quantiser, layer.shape)
    shapes = {name: tuple(layer.get_parameter(name).shape) for name in layer.types}
    return {name: QuantisedOnRead(reading, name, shape) for name, shape in shapes.items()}


def _packed_already(
    layer: QuantisedLinear, front: str, packed: Mapping[str, Stored | Converted | None]
) -> dict[str, StoredBytes | QuantisedOnRead]:
    missing = [name for name, stored in packed.items() if stored is None]
    if missing:
        raise CheckpointError(
            f"{front.rstrip('.')!r} is quantised in these files, but its {', '.join(missing)} is missing: they are cut "
            "off, or quantised in another way (with or without double quantisation) than the model"
        )
    there = {name: stored for name, stored in packed.items() if isinstance(stored, Stored)}
    if isinstance(layer, Linear4bitBytes):
        described = _quantisation(there.pop("state"))
        if layer.weight.is_meta:
            layer.dtype = described["dtype"]
        own = {"quant_type": layer.quant_type, "blocksize": layer.blocksize, "shape": list(layer.shape)}
        own["dtype"] = layer.dtype
        for name, value in own.items():
            if described.get(name) != value:
                raise CheckpointError(
                    f"{front}weight has {name} {described.get(name)!r} in these files, but {value!r} in the model: "
                    "build the model with the quantization_config of the files"
                )
    return {name: StoredBytes(stored, OFFSET if name == OFFSET else "") for name, stored in there.items()}


def _quantisation(state: Stored | Converted) -> dict[str, Any]:
    """The data that bitsandbytes has written about a weight of 4 bits."""
    try:
        described: dict[str, Any] = json.loads(bytes(state.read().tolist()))
        described["dtype"] = getattr(torch, described["dtype"])
        described[OFFSET] = float(described.get(OFFSET, 0.0))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{state.keys[0]!r} is no description of a weight of 4 bits ({error!r})") from error
    return described
