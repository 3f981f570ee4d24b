"""Trained weights as a directory that `transformers` loads with nothing missing and nothing unexpected.

The names, dtypes and places of all tensors are fixed first, from the model's names alone (it may be on meta). Then
every stage writes its tensors into the files, in any process and order, so that at most one stage is in memory at a
time. `save_pretrained` does all of this from one process; `begin`, `write_stage` and `finish` are its parts for stages
that live in workers, which must see the directory under the same path.

For a model that is not from transformers the files hold its state dict, with a tied tensor once, under its first name,
as `safetensors.torch.save_model` does. Read such a file with `safetensors.torch.load_model`, which knows ties, or with
`load_state_dict`, with `strict=False` if the model has ties.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from ...ir.program import StageSpec
from ..model_names import aliases_of, named_tensors, ties_of, unsaved_buffers
from ..quantised.model import names_of_bytes
from . import durable
from .adapters import names_to_save, save_adapters
from .merged import AdapterMerge
from .tensor_file import FilePlan, create_file, fill_file, plan_file
from .weight_files import INDEX_FILE, REPLACED, SINGLE_FILE
from .weights import LiveWeights, PartWeights, WeightSource
from .wrapped import PEFT, TRANSFORMERS, ModelPart, is_a, module_to_save, require_readable


@dataclass(frozen=True)
class WeightsLayout:
    """The files of saved weights. `keys` maps each tensor name, also tied ones, to its keys in the files. Pickles."""

    files: Mapping[str, FilePlan]
    keys: Mapping[str, tuple[str, ...]]

    @property
    def bytes(self) -> int:
        return sum(plan.bytes for plan in self.files.values())


def plan_layout(model: nn.Module, max_shard_bytes: int = 5 * 10**9) -> WeightsLayout:
    """Lay the model's saved tensors out in files of at most `max_shard_bytes` each, or of one larger tensor.

    Every tensor has the dtype that it has in `model`.
    """
    unsaved, tensors = unsaved_buffers(model), named_tensors(model)
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_save", None) or ()]
    ties = ties_of(model)
    groups = {name: [name] for name in tensors if name not in ties and name not in unsaved} | aliases_of(ties)
    rows: dict[str, tuple[torch.dtype, torch.Size]] = {}
    keys: dict[str, tuple[str, ...]] = {}
    metadata = {"format": "pt"}
    for canonical in (name for name in tensors if name in groups):
        chosen = _keys_to_write(model, groups[canonical])
        chosen = tuple(key for key in chosen if not any(p.fullmatch(key) for p in ignored))
        keys |= dict.fromkeys(groups[canonical], chosen)
        rows |= dict.fromkeys(chosen, (tensors[canonical].dtype, tensors[canonical].shape))
        if not is_a(model, TRANSFORMERS):
            metadata |= {alias: canonical for alias in groups[canonical][1:]}
    shards = _split(rows, max_shard_bytes)
    count = len(shards)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] if count != 1 else [SINGLE_FILE]
    return WeightsLayout({name: plan_file(shard, metadata) for name, shard in zip(names, shards, strict=True)}, keys)


def begin(directory: str | os.PathLike[str], layout: WeightsLayout) -> Path:
    """Make a hidden directory with all files of the layout, without data. `directory` does not change until `finish`.

    Raises `CheckpointError` if it cannot be written or the disk has too little space.
    """
    temporary = durable.begin(directory, layout.bytes)
    try:
        with durable.disk_errors(temporary, layout.bytes):
            for name, plan in layout.files.items():
                create_file(temporary / name, plan)
    except BaseException:
        durable.abort(temporary)
        raise
    return temporary


def write_stage(temporary: Path, tensors: Mapping[str, Tensor], layout: WeightsLayout) -> set[str]:
    """Write a stage's weights and buffers into the files, cast one at a time. Returns the names that were written.

    Skips tensors that are never saved and aliases of a tensor that this call writes. Raises `CheckpointError` if the
    disk is full.
    """
    places: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        for key in layout.keys.get(name, ()):
            file = next(file for file, plan in layout.files.items() if key in plan.entries)
            places.setdefault(file, {}).setdefault(key, tensor)
    for file, rows in places.items():
        with durable.disk_errors(temporary / file, layout.bytes):
            fill_file(temporary / file, layout.files[file], rows)
    return {name for name in tensors if name in layout.keys}


def finish(
    temporary: Path,
    directory: str | os.PathLike[str],
    layout: WeightsLayout,
    written: Collection[str],
    model: nn.Module,
    source: WeightSource | None = None,
) -> Path:
    """Write the tensors that no stage holds, the index and the configuration, and replace `directory` by the result.

    `source`, by default the model itself, has the tensors that the computation does not use, which keep their initial
    values. Other files of an existing `directory` (a tokenizer's, say) are kept. Raises `CheckpointError` if the disk
    fails, `PlanError` if a tensor is in no stage and the model on meta; the old directory then stays.
    """
    source = LiveWeights(model) if source is None else source
    done = {key for name in written for key in layout.keys[name]}
    for name, keys in layout.keys.items():
        if not done.issuperset(keys):
            write_stage(temporary, {name: source.read(name)}, layout)
            done |= set(keys)
    with durable.disk_errors(temporary):
        if len(layout.files) > 1:
            durable.write_text(temporary / INDEX_FILE, _index(layout))
        _write_config(temporary, model)
        durable.take_along(Path(directory).resolve(), temporary, REPLACED)
    durable.replace(temporary, directory)
    return Path(directory)


def require_savable(model: nn.Module, merge: bool = False) -> None:
    """Raise the `PlanError` of `save_pretrained` for a model whose files nothing would read back."""
    saved = module_to_save(model)
    if merge:
        _merge_of(saved)
    elif is_a(saved.module, PEFT):
        names_to_save(saved)


def _merge_of(saved: ModelPart) -> AdapterMerge:
    if not is_a(saved.module, PEFT):
        raise PlanError(
            f"save_pretrained(merge=True): {type(saved.module).__name__} has no adapters of PEFT to merge; leave merge "
            "out, and the model is written as it is"
        )
    found = AdapterMerge(saved)
    if is_a(found.base, TRANSFORMERS):
        require_readable(found.base, "")
    return found


def save_pretrained(
    directory: str | os.PathLike[str],
    stages: Iterable[tuple[StageSpec, Mapping[str, Tensor], Mapping[str, Tensor]]],
    model: nn.Module,
    *,
    source: WeightSource | None = None,
    max_shard_bytes: int = 5 * 10**9,
    merge: bool = False,
) -> Path:
    """Write a trained model from one process; `stages` yields (stage, weights, buffers), one stage at a time.

    `model` gives names, ties, dtypes and configuration, and may be on the meta device. See `finish` for `source`. Of a
    wrapper that adds no tensor, what it wraps is written; of a PeftModel its adapters, or with `merge` the model that
    it adapts, with the active adapters merged in.

    Raises `PlanError` for a model whose files nothing would read back, `CheckpointError` if the disk is full or cannot
    be written; `directory` then stays as it was.
    """
    saved = module_to_save(model)
    inside = PartWeights(LiveWeights(model) if source is None else source, saved)
    if is_a(saved.module, PEFT) and not merge:
        return save_adapters(Path(directory), stages, saved, inside)
    merging = _merge_of(saved) if merge else None
    module = saved.module if merging is None else merging.base
    layout = plan_layout(module, max_shard_bytes)
    temporary = begin(directory, layout)
    try:
        written: set[str] = set()
        for spec, weights, buffers in stages:
            owned = {row.name for row in (*spec.params, *spec.buffers) if row.owner}
            both = {**weights, **buffers}
            tensors = {saved.names[name]: tensor for name, tensor in both.items() if name in owned}
            for piece in (tensors,) if merging is None else merging.merge(tensors):
                written |= write_stage(temporary, piece, layout)
        if merging is None:
            return finish(temporary, directory, layout, written, module, inside)
        for piece in merging.rest(inside):
            written |= write_stage(temporary, piece, layout)
        return finish(temporary, directory, layout, written, module, merging.source(inside))
    except BaseException:
        durable.abort(temporary)
        raise


def _keys_to_write(model: nn.Module, names: list[str]) -> tuple[str, ...]:
    """The keys for one tensor with these names, without the names that `transformers` restores by tying.

    A tie that the model's configuration does not know is written under every name, or loading would miss one.
    """
    if not is_a(model, TRANSFORMERS):
        return (names[0],)
    patterns = [
        f"{path}.{pattern}" if path else pattern
        for path, module in model.named_modules(remove_duplicate=False)
        for pattern in getattr(module, "_tied_weights_keys", None) or ()
    ]
    kept = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
    return tuple(kept or names[:1]) if len(names) > 1 else (names[0],)


def _split(
    rows: Mapping[str, tuple[torch.dtype, torch.Size]], max_bytes: int
) -> list[dict[str, tuple[torch.dtype, torch.Size]]]:
    shards: list[dict[str, tuple[torch.dtype, torch.Size]]] = [{}]
    size = 0
    for key, (dtype, shape) in rows.items():
        num_bytes = shape.numel() * dtype.itemsize
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = (dtype, shape)
        size += num_bytes
    return shards


def _index(layout: WeightsLayout) -> str:
    total = sum(e.end - e.begin for plan in layout.files.values() for e in plan.entries.values())
    places = {key: file for file, plan in layout.files.items() for key in plan.entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True)


def _write_config(temporary: Path, model: nn.Module) -> None:
    """The configuration as transformers writes it, without touching the user's own."""
    if not is_a(model, TRANSFORMERS):
        return
    hf: Any = model
    config = copy.deepcopy(hf.config)
    if hasattr(config, "quantization_config") and not names_of_bytes(model):
        del config.quantization_config  # of the files that the weights were unpacked from
    config.dtype = str(hf.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(temporary)
    if hf.can_generate() and getattr(hf, "generation_config", None) is not None:
        hf.generation_config.save_pretrained(temporary)
