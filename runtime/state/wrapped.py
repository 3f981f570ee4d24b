"""The module of a model that files of weights belong to: the model itself, or the one library model in a wrapper.

`torch.compile`, data parallelism and a user's module that only calls a model add names in front and nothing else; the
model inside is written as if it were alone. A wrapper with tensors of its own is no library's model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from ..model_names import named_tensors, unsaved_buffers
from ..quantised.model import names_of_bytes

TRANSFORMERS = ("transformers.modeling_utils", "PreTrainedModel")
PEFT = ("peft.peft_model", "PeftModel")
MIXED = ("peft.mixed_model", "PeftMixedModel")
MOST_NAMES = 4
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")  # what PEFT puts into names


@dataclass(frozen=True)
class ModelPart:
    """A module of a model, and for names of tensors in the model their names there, as files have them."""

    module: nn.Module
    names: dict[str, str]


def is_a(model: nn.Module, kind: tuple[str, str]) -> bool:
    """Whether a model is of a library's class, or of one derived from it; the library is not imported."""
    return any((cls.__module__, cls.__qualname__) == kind for cls in type(model).__mro__)


def parts_of(model: nn.Module) -> Iterator[ModelPart]:
    """The parts that files of weights may be of, the whole model first: each with the names that the files have."""
    names = list(named_tensors(model))
    wholes = [("", model), *((path, inner) for path, inner in _library_models(model, "") if path)]
    for path, inner in wholes:
        front = f"{path}." if path else ""
        found = {name: name.removeprefix(front) for name in names if name.startswith(front)}
        yield ModelPart(inner, found)
        adapted = _model_below_adapters(inner, found)
        if adapted is not None:
            yield adapted


def part_by_names(model: nn.Module, keys: Collection[str]) -> ModelPart | None:
    """The one module below the model whose names are those of the files; None where no or several modules are."""
    names = list(named_tensors(model))
    found = []
    for path, inner in model.named_modules():
        front = f"{path}."
        own = {name: name.removeprefix(front) for name in names if path and name.startswith(front)}
        if own and set(keys) <= set(own.values()):
            found.append(ModelPart(inner, own))
    most = [part for part in found if len(part.names) == min(len(other.names) for other in found)]
    return most[0] if len(most) == 1 else None


def _model_below_adapters(module: nn.Module, names: Mapping[str, str]) -> ModelPart | None:
    """The model that PEFT has put adapters into, under the names from before; None if there are no adapters."""
    base: Any = module
    front = ""
    if is_a(module, PEFT):
        base = module.get_base_model()  # type: ignore[operator]
        front = next(f"{path}." for path, inner in module.named_modules() if inner is base)
    plain = {name: _WRAPPED.sub("", own.removeprefix(front)) for name, own in names.items() if own.startswith(front)}
    return ModelPart(base, plain) if plain != dict(names) else None


def module_to_save(model: nn.Module) -> ModelPart:
    """Raises `PlanError` for a model whose files no `from_pretrained` would read back."""
    found = dict(_library_models(model, ""))
    packed = names_of_bytes(model)
    if packed and not any(is_a(inner, PEFT) for inner in found.values()):
        raise PlanError(
            f"save_pretrained: {sorted(packed)[0]} is quantised, and its library alone writes such weights: call "
            "job.sync(), then save_pretrained of the model; of a PeftModel the adapters are written here"
        )
    if not found:
        return ModelPart(model, {name: name for name in named_tensors(model)})
    path, inner = next(iter(found.items()))
    own, theirs, unsaved = named_tensors(model), named_tensors(inner), unsaved_buffers(model)
    places = {id(tensor): name for name, tensor in reversed(theirs.items())}
    extra = [name for name, tensor in own.items() if id(tensor) not in places and name not in unsaved]
    if extra or len(found) > 1:
        raise PlanError(_why_not(model, found, extra))
    _require_own_reader(inner, path)
    if is_a(inner, TRANSFORMERS):
        require_readable(inner, path)
    front = f"{path}." if path else ""
    names = {}
    for name, tensor in own.items():
        stripped = name.removeprefix(front)
        names[name] = stripped if name.startswith(front) and stripped in theirs else places.get(id(tensor), name)
    return ModelPart(inner, names)


def _library_models(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that have a `from_pretrained` of their own, each once."""
    reader = next((cls for cls in type(module).__mro__ if "from_pretrained" in vars(cls)), None)
    if reader is not None and not reader.__module__.startswith("torch."):  # as nn.Embedding has
        yield path, module
        return
    for name, child in module.named_children():
        yield from _library_models(child, f"{path}.{name}" if path else name)


def _why_not(model: nn.Module, found: dict[str, nn.Module], extra: list[str]) -> str:
    held = ", ".join(f"{type(inner).__name__} as {path!r}" for path, inner in found.items())
    path = next(iter(found))
    beside = f" and {_some(extra)} beside" if extra else ""
    return (
        f"save_pretrained: {type(model).__name__} holds {held}{beside}: no from_pretrained reads such files back. Call "
        f"job.sync(), then model.{path}.save_pretrained(directory) for that part and torch.save(model.state_dict(), "
        "file) for all; job.state_dict() gives all without sync"
    )


def _require_own_reader(inner: nn.Module, path: str) -> None:
    """Raise `PlanError` for a library whose files are not known here."""
    if is_a(inner, PEFT) or (is_a(inner, TRANSFORMERS) and not getattr(inner, "_hf_peft_config_loaded", False)):
        return
    if is_a(inner, MIXED):
        raise PlanError(
            "save_pretrained: PEFT writes no files of a PeftMixedModel: call job.sync(), then torch.save("
            f"{_place(path)}.state_dict(), file), or merge it, {_place(path)}.merge_and_unload().save_pretrained("
            "directory)"
        )
    what = "with adapters in it" if is_a(inner, TRANSFORMERS) else "which is not of transformers"
    raise PlanError(
        f"save_pretrained: {type(inner).__name__}, {what}, is written by its own library alone: call job.sync(), then "
        f"{_place(path)}.save_pretrained(directory)"
    )


def require_readable(inner: nn.Module, path: str) -> None:
    """Raise `PlanError` where the model that `from_pretrained` builds of class and configuration has no place for a
    tensor: someone has put parts in, or exchanged some."""
    twin = _built_again(inner)
    if twin is None:
        return
    own, other = _saved_shapes(inner), _saved_shapes(twin)
    wrong = [f"{name} {list(shape)}" for name, shape in own.items() if other.get(name) != shape]
    if wrong:
        raise PlanError(
            f"save_pretrained: {type(inner).__name__}.from_pretrained builds the model of its config, which differs in "
            f"{_some(wrong)}, so that these would start anew. Where the config can say it (num_labels, vocab_size), "
            f"set it; otherwise call job.sync() and torch.save({_place(path)}.state_dict(), file)"
        )


def _built_again(inner: nn.Module) -> nn.Module | None:
    """The class with nothing but a copy of the configuration, on meta; None where it takes more, as `from_pretrained`
    of it will."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            made: nn.Module = type(inner)(copy.deepcopy(inner.config))
            return made
    except Exception:  # whatever the constructor of anybody's class raises
        return None


def _saved_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    unsaved = unsaved_buffers(module)
    return {name: tuple(t.shape) for name, t in named_tensors(module).items() if name not in unsaved}


def _place(path: str) -> str:
    return f"model.{path}" if path else "model"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
