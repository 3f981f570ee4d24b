"""Match the tensors in a directory of safetensors to the names of a model, and report what does not agree."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from ...ir.documents import Unreadable, is_inside, read_json
from ...ir.errors import CheckpointError
from ..model_names import aliases_of, named_tensors, ties_of, unsaved_buffers
from ..quantised.layers import QuantisedLinear
from ..quantised.packed import has_matrices_transposed
from .quantised import (
    CONFIG_FILE,
    UNNEEDED,
    PackedPlaces,
    QuantisedOnRead,
    StoredBytes,
    UnpackedOnRead,
    packing_in_files,
    places_in_files,
    quantised_layers,
    quantization_config,
)
from .stored import Converted, Stored, dtype_of, to_model_names
from .tensor_file import TensorFile
from .wrapped import ModelPart, part_by_names, parts_of

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The files of an earlier save, which a loader would take for parts of a later one.
REPLACED = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(generation_|adapter_)?config\.json"
)


Place: TypeAlias = Stored | Converted | StoredBytes | QuantisedOnRead | UnpackedOnRead


@dataclass(frozen=True)
class Match:
    """`where` maps the names found in the files to their tensors, `misshapen` names to (shape in the files, shape in
    the model)."""

    where: dict[str, Place]
    missing: list[str]
    misshapen: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    unexpected: list[str]

    def error(self, directory: Path, refused: list[str]) -> CheckpointError:
        """The error to raise if `refused` names are missing or shapes differ."""
        rows = [f"{directory}: these weights are not those of the model."]
        if not self.where:
            rows.append("Not one name agrees.")
        rows += _list_names("Missing", refused)
        shapes = [f"{n} (file {list(a)}, model {list(b)})" for n, (a, b) in self.misshapen.items()]
        rows += _list_names("Of another shape", shapes)
        rows += _list_names("Unexpected", self.unexpected)
        rows.append(
            'A head that the files lack is initialised with missing_ok=["NAME.*"]; names that differ by a prefix '
            "take prefix=...; or load the weights yourself and give the loaded model instead of the directory."
        )
        return CheckpointError("\n  ".join(rows))


def open_files(directory: Path) -> dict[str, Stored]:
    """Every tensor in the safetensors files of `directory`, by its key.

    Raises `CheckpointError` if there are no such files or one is damaged.
    """
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        names: Iterable[str] = [SINGLE_FILE]
    elif index.is_file():
        names = _names_in(index)
    else:
        there = sorted(p.name for p in directory.iterdir())[:20] if directory.is_dir() else "no such directory"
        raise CheckpointError(
            f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE} is here; found: {there}. Pickled weights (.bin, .pt) "
            "are not read: load them with their own library and save them as safetensors, or give the loaded model."
        )
    files = [TensorFile(directory / name) for name in names]
    return {key: Stored(file, key) for file in files for key in file.entries}


def _names_in(index: Path) -> list[str]:
    """The files that an index names, all of them in its directory. Links may lead out of it, as those of a cache do."""
    try:
        document = read_json(index)
        names = {str(name) for name in document["weight_map"].values()}
    except Unreadable as error:
        raise CheckpointError(f"{index}: {error}.") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no index of safetensors files ({error!r}).") from error
    outside = sorted(name for name in names if not (is_inside(name) and name.endswith(".safetensors")))
    if outside:
        raise CheckpointError(f"{index}: names {outside[0]!r:.80}, which is no safetensors file in its directory.")
    return sorted(names)


def match_names(model: nn.Module, files: Mapping[str, Stored], prefix: str | None) -> Match:
    """Find the tensor of every saved name of `model`, through wrappers, ties and the `prefix` (see
    `weights.open_directory`). A prefix that is given is all that names may differ by.

    Raises `CheckpointError` if names that the model ties have different values.
    """
    best: Match | None = None
    for part in islice(parts_of(model), None if prefix is None else 1):  # of equal ones the plainest
        found = _match_part(model, part, files, prefix)
        best = found if best is None or len(found.where) > len(best.where) else best
    assert best is not None
    named = None if best.where or prefix is not None else part_by_names(model, files)
    return best if named is None else _match_part(model, named, files, prefix)


def packed_weights(model: nn.Module, directory: Path) -> dict[str, PackedPlaces]:
    """The packed form of the weights of a model on the meta device that files of a directory have packed, by name.
    Raises `CheckpointError` for a method of quantisation that is not read here."""
    config = quantization_config(directory)
    if not config or any(quantised_layers(model)):
        return {}
    files, best = open_files(directory), dict[str, PackedPlaces]()
    for part in parts_of(model):
        found = _packed_of_part(model, config, *_names_in_files(part, files, None))
        best = found if len(found) > len(best) else best
    for alias, first in ties_of(model).items():
        if alias in best or first in best:
            raise CheckpointError(
                f"{first!r} and {alias!r} are one tensor in the model, and packed in the files: build the model with "
                "tie_word_embeddings=False, as the files have them"
            )
    return best


def _packed_of_part(
    model: nn.Module, config: Mapping[str, Any], found: Mapping[str, Stored | Converted], keys: Mapping[str, str]
) -> dict[str, PackedPlaces]:
    """The packed form of parameters by name; `keys` has their names in files."""
    places = {}
    for name, key in keys.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        param = module._parameters.get(leaf)
        if param is not None and config and not isinstance(module, QuantisedLinear):
            places[name] = packing_in_files(config, key, param, found, has_matrices_transposed(module))
    return {name: place for name, place in places.items() if place is not None}


def _names_in_files(
    part: ModelPart, files: Mapping[str, Stored], prefix: str | None
) -> tuple[dict[str, Stored | Converted], dict[str, str]]:
    """The tensors of the files under the names that the part's library gives them, and for each name in the model the
    name that files would have for it."""
    front = getattr(part.module, "base_model_prefix", "") if prefix is None else prefix
    rules = _prefix_rules(front)
    found = to_model_names(part.module, files, {rule(own) for rule in rules for own in part.names.values()})
    to_key = max(rules, key=lambda rule: sum(rule(own) in found for own in part.names.values()))
    return found, {name: to_key(own) for name, own in part.names.items()}


def _match_part(model: nn.Module, part: ModelPart, files: Mapping[str, Stored], prefix: str | None) -> Match:
    unsaved, ties = unsaved_buffers(model), ties_of(model)
    wanted = {name: tensor for name, tensor in named_tensors(model).items() if name not in unsaved}
    found, keys = _names_in_files(part, files, prefix)
    aliases = aliases_of(ties)
    where: dict[str, Place] = {}
    unneeded: set[str] = set()
    for path, layer in quantised_layers(model):
        first = next(iter(layer.types))
        if f"{path}.{first}" in keys:
            base = keys[f"{path}.{first}"].removesuffix(first)
            places = places_in_files(layer, base, found)
            unneeded |= {f"{base}{name}" for name in UNNEEDED} | {layer.file_key(base, name) for name in layer.extras}
            where |= {f"{path}.{leaf}": place for leaf, place in places.items()}
    config = next((quantization_config(stored.file.path.parent) for stored in files.values()), {})
    for name, packed in _packed_of_part(model, config, found, keys).items():
        where[name] = UnpackedOnRead(packed.require(), tuple(wanted[name].shape))
        unneeded |= packed.extras
    for name in [name for name in wanted if name not in where]:
        canonical = ties.get(name, name)
        present = [keys[other] for other in aliases.get(canonical, [name]) if keys.get(other) in found]
        if present:
            where[name] = found[present[0]]
        if name == canonical:
            _require_equal(found, present)
    shapes = {name: (stored.shape, tuple(wanted[name].shape)) for name, stored in where.items()}
    expected = {*keys.values(), *unneeded, *(key for place in where.values() for key in place.keys)}
    ignored = [re.compile(p) for p in getattr(part.module, "_keys_to_ignore_on_load_unexpected", None) or ()]
    unexpected = {key for name, stored in found.items() if name not in expected for key in stored.keys}
    return Match(
        where,
        [name for name in wanted if name not in where],
        {name: pair for name, pair in shapes.items() if pair[0] != pair[1]},
        sorted(key for key in unexpected if not any(p.search(key) for p in ignored)),
    )


def require_kinds(directory: Path, model: nn.Module, match: Match) -> None:
    """Raise `CheckpointError` where files have numbers of another kind than the model: quantised weights, which are not
    those of layers of the library that quantised them, would train as what their codes say."""
    how = str(quantization_config(directory).get("quant_method", ""))
    words = f" (quantization_config in {CONFIG_FILE} says {how})" if how else ""
    remedy = "give weights that are not quantised, or a model that was built with the quantization_config of the files"
    tensors = named_tensors(model)
    for name, place in match.where.items():
        kinds = [dtype_of(place), tensors[name].dtype] if isinstance(place, (Stored, Converted)) else []
        if len({_kind(dtype) for dtype in kinds}) > 1:
            found, wanted = (str(dtype).removeprefix("torch.") for dtype in kinds)
            raise CheckpointError(
                f"{directory}: {place.keys[0]!r} is {found} in the files, {name!r} of the model is {wanted}{words}: "
                f"{remedy}"
            )
    if how and match.missing and match.unexpected and not any(quantised_layers(model)):
        raise CheckpointError(
            f"{directory}: {match.missing[0]!r} is not in the files, which have {match.unexpected[0]!r} instead"
            f"{words}: {remedy}"
        )


def _kind(dtype: torch.dtype) -> str:
    """The kind of numbers: those of one kind can be converted into each other. Floats of 8 bits have scales."""
    if dtype.is_floating_point:
        return "float" if dtype.itemsize > 1 else str(dtype)
    return "complex" if dtype.is_complex else "bool" if dtype == torch.bool else "integer"


def _prefix_rules(front: str) -> list[Callable[[str], str]]:
    """The functions to try that turn a name of the model into a name in the files, the plainest first."""
    front = f"{front}." if front and not front.endswith(".") else front
    rules: list[Callable[[str], str]] = [lambda name: name]
    if front:
        rules += [lambda name: name.removeprefix(front), lambda name: front + name]
    return rules


def _require_equal(found: Mapping[str, Stored | Converted], names: list[str]) -> None:
    for other in names[1:]:
        if not torch.equal(found[names[0]].read(), found[other].read()):
            raise CheckpointError(
                f"{names[0]!r} and {other!r} differ in the files, but the model ties them to one tensor. Construct it "
                "without the tie (tie_word_embeddings=False in a Hugging Face config)."
            )


def _list_names(title: str, names: list[str], most: int = 12) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return [f"{title} ({len(names)}): {', '.join(names[:most])}{more}."]
