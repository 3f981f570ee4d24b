"""Adapters of PEFT merged into the weights below them, one layer at a time, by PEFT's own arithmetic.

A twin of the model on meta has PEFT's layers. As soon as all tensors of such a layer are there, they are put into the
twin, PEFT merges them in fp32, and what comes out goes to a file under the name that it
has in a model without adapters. A weight that is tied to another one which merging does not change alike is untied, in
the configuration, too: the merged model then computes what the adapted one does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError
from ..model_names import aliases_of, meta_twin, named_tensors, ties_of
from ..quantised.plain import Unpacking
from ..quantised.raw_bytes import as_bytes
from .weights import PartWeights, WeightSource
from .wrapped import ModelPart

HALF = (torch.float16, torch.bfloat16)  # merged in fp32, and rounded once
_APART = "leave merge out, and the adapters are written as they are"


@dataclass
class AdaptedLayer:
    """A module that PEFT put in place of the one at `plain`. `needed`: the names in the PeftModel of what it computes
    with; `given`: those of its tensors that are there."""

    module: Any
    path: str
    plain: str
    needed: frozenset[str]
    given: dict[str, Tensor] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.needed <= self.given.keys()

    def merge(self) -> dict[str, Tensor]:
        """The tensors of the module without adapters, under their plain names; forgets what was given."""
        values = {id(t): self.given[n] for n, t in _named_tensors(self.module, self.path) if n in self.given}
        stores = [store for m in self.module.modules() for store in (m._parameters, m._buffers)]
        before = [dict(store) for store in stores]
        real: dict[int, Tensor] = {}
        for store in stores:
            for leaf, old in store.items():
                if old is not None and id(old) in values:
                    new = values[id(old)].detach()
                    new = new.float() if new.dtype in HALF else new
                    is_param = isinstance(old, nn.Parameter)
                    store[leaf] = real.setdefault(id(old), nn.Parameter(new, False) if is_param else new)
        try:
            inner = _merge_and_unload(self.module)
            return {name: t.detach() for name, t in _named_tensors(inner, self.plain) if not t.is_meta}
        except Exception as error:  # a kind that PEFT does not merge, or numbers that are not finite
            kind = f"{type(self.module).__module__}.{type(self.module).__name__}"
            text = f"save_pretrained(merge=True): {self.plain}: {str(error).rstrip('.')} ({kind}): {_APART}"
            raise PlanError(text) from error
        finally:
            for store, old_store in zip(stores, before):
                store.clear()
                store.update(old_store)
            self.given = {}


class UnpackedWeights(WeightSource):
    """The weights of a model with bytes under the names of the model with plain layers."""

    def __init__(self, whole: WeightSource, unpacking: Unpacking):
        self._whole, self._weights = whole, unpacking.weights
        self.ties = ties_of(unpacking.model)

    def read(self, name: str) -> Tensor:
        weight = self._weights.get(name)
        if weight is None:
            return self._whole.read(name)
        return weight.unpack({part: as_bytes(self._whole.read(part)) for part in weight.parts.values()})


class AdapterMerge:
    """Turns tensors of a PeftModel, stage by stage, into those of the model without adapters, which is `base`, on meta.
    Quantised weights are unpacked first, one at a time.

    Raises `PlanError` for adapters that cannot be merged.
    """

    def __init__(self, saved: ModelPart):
        _require_mergeable(saved.module)
        self._unpacking = Unpacking(saved.module, meta_twin)
        model: Any = self._unpacking.model
        twin: Any = meta_twin(model)
        root: nn.Module = twin.get_base_model()
        self._front = next(f"{path}." for path, inner in twin.named_modules() if inner is root)
        self._layers = _adapted_layers(root, self._front, set(model.peft_config))
        self._aliases = aliases_of(ties_of(model))
        self._first = ties_of(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PEFT about ties, which are put right here
            other: Any = meta_twin(model)
            self.base: Any = other.unload()
            if self._unpacking.dtype is not None:
                nn.Module.to(self.base, self._unpacking.dtype)  # transformers' own refuses a model that was quantised
        self._untie()
        self._base_names = set(named_tensors(self.base))
        self._require_merged(model)
        own = {name: self._plain(name) for name in named_tensors(model)}
        self.part = ModelPart(self.base, {name: plain for name, plain in own.items() if plain is not None})

    def merge(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The tensors of the model without adapters that these tensors determine, under its names."""
        for plain in self._unpacking.unpack(tensors):
            yield from self._merge_plain(plain)

    def source(self, whole: WeightSource) -> WeightSource:
        """The weights of the model without adapters, of a source of the saved model's."""
        return PartWeights(UnpackedWeights(whole, self._unpacking), self.part)

    def _merge_plain(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for name, tensor in tensors.items():
            first = self._first.get(name, name)
            for alias in self._aliases.get(first, [name]):
                layer, plain = self._layer_of(alias), self._plain(alias)
                if layer is not None:
                    layer.given[alias] = tensor
                elif plain is not None:
                    yield {plain: tensor}
        yield from self._merge_complete()

    def rest(self, source: WeightSource) -> Iterator[dict[str, Tensor]]:
        """The layers of which no stage holds all tensors: the computation does not use them."""
        source = UnpackedWeights(source, self._unpacking)
        for layer in list(self._layers.values()):
            for name in sorted(layer.needed - layer.given.keys()):
                layer.given[name] = source.read(name)
            yield from self._merge_complete()

    def _merge_complete(self) -> Iterator[dict[str, Tensor]]:
        for path in [path for path, layer in self._layers.items() if layer.is_whole]:
            yield self._layers.pop(path).merge()

    def _layer_of(self, name: str) -> AdaptedLayer | None:
        parts = name.split(".")
        return next((self._layers[p] for i in range(len(parts)) if (p := ".".join(parts[:i])) in self._layers), None)

    def _plain(self, name: str) -> str | None:
        """The name in the model without adapters; None for a tensor in an adapted layer, or of PEFT's own."""
        plain = name.removeprefix(self._front)
        is_inside = plain != name and self._layer_of(name) is None
        return plain if is_inside and plain in self._base_names else None

    def _require_merged(self, model: Any) -> None:
        """Raise `PlanError` where merging would lose what is trained, such as a network that mixes adapters."""
        for name, tensor in named_tensors(model).items():
            first = self._first.get(name, name)
            names = self._aliases.get(first, [name])
            if tensor.requires_grad and not any(self._layer_of(n) or self._plain(n) for n in names):
                raise PlanError(
                    f"save_pretrained(merge=True): {name} of the adapters of the kind {kinds_of(model)} is no change "
                    f"of weights: {_APART}"
                )

    def _untie(self) -> None:
        """Part the weights of the base that are one tensor before merging and are not after it."""
        places = {layer.plain: layer for layer in self._layers.values()}
        before = aliases_of(ties_of(meta_twin(self.base)))
        for names in before.values():
            layers = [places.get(name.rpartition(".")[0]) for name in names]
            changed = [layer is not None and _changes(layer.module) for layer in layers]
            by_tokens = all(hasattr(layer.module, "token_adapter") for layer in layers if layer is not None)
            if any(changed) and not by_tokens:  # tied adapters of tokens change the same rows by the same values
                for name in names:
                    owner, _, leaf = name.rpartition(".")
                    old = getattr(self.base.get_submodule(owner), leaf)
                    setattr(self.base.get_submodule(owner), leaf, nn.Parameter(torch.empty_like(old), False))
        config = getattr(self.base, "config", None)
        if config is not None and getattr(config, "tie_word_embeddings", False) and self._heads_differ():
            config.tie_word_embeddings = False

    def _heads_differ(self) -> bool:
        given, taken = self.base.get_input_embeddings(), self.base.get_output_embeddings()
        return given is not None and taken is not None and given.weight is not taken.weight


def _named_tensors(module: nn.Module, path: str) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named_tensors(module).items():
        yield (f"{path}.{name}" if path else name), tensor


def _adapted_layers(root: nn.Module, front: str, adapters: set[str]) -> dict[str, AdaptedLayer]:
    """The outermost modules that PEFT has put in, by path in the PeftModel."""
    found: dict[str, AdaptedLayer] = {}

    def visit(module: Any, plain: str) -> None:
        if hasattr(module, "adapter_layer_names"):
            path = f"{front}{plain}"
            others = adapters - set(module.active_adapters)
            unused = {"original_module"} if "modules_to_save" in module._modules and module.active_adapters else set()
            names = [name for name, _ in _named_tensors(module, path)]
            needed = [n for n in names if not (others | unused) & set(n.removeprefix(path).split("."))]
            found[path] = AdaptedLayer(module, path, plain, frozenset(needed))
            return
        for name, child in module.named_children():
            visit(child, f"{plain}.{name}" if plain else name)

    visit(root, "")
    return found


def _merge_and_unload(module: Any) -> nn.Module:
    """The module below PEFT's, with its active adapters merged in. The same steps as PEFT's own `merge_and_unload`."""
    with torch.no_grad():
        if hasattr(module, "unload_and_optionally_merge_module"):
            inner: nn.Module = module.unload_and_optionally_merge_module(
                merge=True, safe_merge=True, adapter_names=None
            )
            return inner
        layer = module
        while hasattr(layer, "base_layer"):  # one for each parameter of a module that `target_parameters` names
            if hasattr(layer, "merge"):
                layer.merge(safe_merge=True)
            layer = layer.base_layer
        inner = module.get_base_layer()
        return inner


def _changes(module: Any) -> bool:
    return bool(module.active_adapters)


def _require_mergeable(model: Any) -> None:
    if not hasattr(model.base_model, "merge_and_unload"):
        raise PlanError(
            f"save_pretrained(merge=True): adapters of the kind {kinds_of(model)} are no change of weights, so that "
            f"there is nothing to merge: {_APART}"
        )


def kinds_of(model: Any) -> str:
    """The kinds of the adapters of a PeftModel, as PEFT names them."""
    return ", ".join(sorted({str(getattr(c.peft_type, "value", c.peft_type)) for c in model.peft_config.values()}))
