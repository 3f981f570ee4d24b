"""The place of one name's value in files: one tensor, or pieces that transformers puts together while loading.

A few architectures are saved under other names, or in another layout, than the modules of transformers have (experts of
a mixture one by one, for instance). The library's tables of renamings and converters are applied to one tensor at a
time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import CheckpointError
from .tensor_file import CODES, TensorFile

BESIDE = re.compile(r"\.weight(_packed|_scale_inv|_scale|_zero_point|_global_scale|_shape)$")


@dataclass(frozen=True)
class Stored:
    """One tensor of a file."""

    file: TensorFile
    key: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.file.entries[self.key].shape

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,)

    def read(self) -> Tensor:
        return self.file.read(self.key)

    def read_rows(self, begin: int, end: int) -> Tensor:
        return self.file.read_rows(self.key, begin, end)


@dataclass(frozen=True)
class Converted:
    """A tensor that a converter of transformers makes from several tensors of the files, or cuts out of one.

    `rows` are (pattern of the converter, tensor) in the converter's order; `name` says which of its results this is.
    """

    name: str
    shape: tuple[int, ...]
    rows: tuple[tuple[str, Stored], ...]
    target: str
    converter: Any
    config: Any

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(stored.key for _, stored in self.rows)

    def read(self) -> Tensor:
        pieces = [(pattern, stored.read()) for pattern, stored in self.rows]
        return _convert(self.converter, self.target, pieces, self.config)[self.name].contiguous()

    def read_rows(self, begin: int, end: int) -> Tensor:
        return self.read()[begin:end].clone()


def dtype_of(stored: Stored | Converted) -> torch.dtype:
    first = stored if isinstance(stored, Stored) else stored.rows[0][1]
    return CODES[first.file.entries[first.key].code]


def refuse_nan(tensor: Tensor, keys: Sequence[str]) -> Tensor:
    """The tensor, read from these keys of files. Raises `CheckpointError` where it has NaN in it."""
    # A sum makes no tensor of answers beside a large weight; infinities of both signs make NaN, too.
    if tensor.is_floating_point() and tensor.sum(dtype=torch.float32).isnan() and tensor.isnan().any():
        raise CheckpointError(f"{', '.join(keys)} in the files has NaN in it: give weights from before they diverged")
    return tensor


def to_model_names(
    model: nn.Module, stored: Mapping[str, Stored], known: Collection[str]
) -> dict[str, Stored | Converted]:
    """The tensors of the files under the names that transformers loads them to; other models' keys stay as they are.

    A key that is itself in `known` is renamed only where the new name is known too. A tensor beside a packed weight,
    such as its scales, is renamed and put together as the weight is.
    """
    renamings, converters = _tables(model)
    result: dict[str, Stored | Converted] = {}
    groups: dict[tuple[str, str], tuple[Any, list[tuple[str, Stored]]]] = {}
    for key in sorted(stored, key=_natural):
        beside = BESIDE.search(key)
        end = "" if beside is None else beside[1]
        own = key.removesuffix(end)
        name, pattern, used = own, None, None
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        for converter in converters:
            name, pattern = converter.rename_source_key(name)
            if pattern is not None:
                used = converter
                break
        if own in known and name not in known:
            name, used = own, None
        if used is None:
            result[f"{name}{end}"] = stored[key]
        else:
            groups.setdefault((name, end), (used, []))[1].append((str(pattern), stored[key]))
    for (target, end), (converter, rows) in groups.items():
        found = _converter_results(target, converter, tuple(rows), getattr(model, "config", None))
        result |= {f"{name}{end}": place for name, place in found.items()}
    return result


def _converter_results(
    target: str, converter: Any, rows: tuple[tuple[str, Stored], ...], config: Any
) -> dict[str, Converted]:
    """One entry per result of the converter; running it on meta tensors gives the shapes."""
    empty = [
        (pattern, torch.empty(stored.shape, dtype=CODES[stored.file.entries[stored.key].code], device="meta"))
        for pattern, stored in rows
    ]
    try:
        results = _convert(converter, target, empty, config)
    except Exception as error:  # whatever the library raises for pieces that do not fit each other
        places = sorted({str(stored.file.path) for _, stored in rows})
        raise CheckpointError(f"{', '.join(places)}: {target!r} cannot be put together ({error}).") from error
    return {
        name: Converted(name, tuple(tensor.shape), rows, target, converter, config) for name, tensor in results.items()
    }


def _convert(converter: Any, target: str, pieces: list[tuple[str, Tensor]], config: Any) -> dict[str, Tensor]:
    fresh = copy.deepcopy(converter)  # a converter keeps the tensors that it is given
    for pattern, tensor in pieces:
        fresh.add_tensor(target, target, pattern, tensor)
    results = fresh.convert(target, config=config)
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in results.items()}


def _tables(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """The library's renamings and converters for this model; none for a model that is not of the library."""
    if not any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__):
        return [], []
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    transforms = copy.deepcopy(get_model_conversion_mapping(model))  # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    return renamings, [t for t in transforms if isinstance(t, WeightConverter)]


def _natural(key: str) -> list[tuple[int, int, str]]:
    """A sort key that orders numbered parts by number, as the library does before it puts pieces together."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]
