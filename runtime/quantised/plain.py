"""The way back from bytes: a model with plain layers in place of quantised ones, and their weights, unpacked.

In: a model with `QuantisedLinear` in it, on any device, and tensors under its names. Out: a twin on meta whose layers
are those of PyTorch and transformers, and the tensors under its names, one unpacked weight at a time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layers import QuantisedLinear
from .packed import PackedExperts, PackedWrapper
from .pieces import lending

# Of PEFT's layers and transformers' models, by which PEFT tells what is quantised.
MARKS = {"quantization_backend", "is_loaded_in_4bit", "is_loaded_in_8bit", "is_quantized"}


@dataclass(frozen=True)
class PackedWeight:
    """A weight of the plain model. `parts`: the tensors of which it is unpacked, their names in the model with bytes by
    those in the layer. `is_transposed`: the plain model has its matrices as [columns, rows]."""

    layer: QuantisedLinear
    parts: Mapping[str, str]
    dtype: torch.dtype
    is_transposed: bool

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The weight, of the tensors under their names in the model with bytes."""
        with lending(None):
            found = self.layer.unpack({own: tensors[name] for own, name in self.parts.items()}, self.dtype)
        return found.transpose(-2, -1).contiguous() if self.is_transposed else found


class Unpacking:
    """`model`: the twin on meta with plain layers, or the given model where nothing is packed. `weights`: those of it
    that are unpacked, by name. twin_of: makes a copy on meta."""

    def __init__(self, given: nn.Module, twin_of: Callable[[nn.Module], nn.Module]):
        self.weights: dict[str, PackedWeight] = {}
        self.model = given
        if any(isinstance(module, QuantisedLinear) for module in given.modules()):
            self.model = twin_of(given)
            self._dtype = _type_beside(given)
            modules = dict(self.model.named_modules(remove_duplicate=False))
            for path, module in modules.items():
                if not isinstance(modules.get(path.rpartition(".")[0]), PackedExperts):  # exchanged as a whole
                    self._exchange(path, module)
        self._homes = {part: name for name, weight in self.weights.items() for part in weight.parts.values()}
        self._held: dict[str, Tensor] = {}

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of the unpacked weights; None where nothing is packed."""
        return next((weight.dtype for weight in self.weights.values()), None)

    def unpack(self, tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """The tensors under the names of the plain model: first those that are not packed, then weight by weight."""
        yield {name: tensor for name, tensor in tensors.items() if name not in self._homes}
        for name, tensor in tensors.items():
            home = self._homes.get(name)
            if home is None:
                continue
            self._held[name] = tensor
            weight = self.weights[home]
            if set(weight.parts.values()) <= self._held.keys():
                yield {home: weight.unpack({part: self._held.pop(part) for part in weight.parts.values()})}

    def _exchange(self, path: str, module: Any) -> None:
        if isinstance(module, PackedExperts):
            self.model.set_submodule(path, self._plain_experts(path, module))
        elif isinstance(module, QuantisedLinear):
            self.model.set_submodule(path, self._plain_linear(path, module))
        elif isinstance(module, PackedWrapper):
            module.__class__ = type(module).__bases__[1]
        for name in MARKS & vars(module).keys():
            delattr(module, name)
        if type(module).__module__.startswith("peft.tuners.") and type(module).__module__.endswith(".bnb"):
            module.__class__ = _plain_class(type(module))
            module.fan_in_fan_out = bool(module.base_layer.is_transposed)
            module.is_target_conv_1d_layer = module.fan_in_fan_out

    def _plain_linear(self, path: str, layer: QuantisedLinear) -> nn.Module:
        rows, columns = layer.shape
        weight = self._note(f"{path}.weight", path, layer, layer.is_transposed)
        if layer.is_transposed:
            with torch.device("meta"):
                plain: nn.Module = layer.replaced.layer.source_cls(rows, columns)
        else:
            plain = nn.Linear(columns, rows, bias=False, device="meta")
        plain.weight, plain.bias = weight, layer.bias  # type: ignore[assignment]
        return plain.train(layer.training)

    def _plain_experts(self, path: str, experts: PackedExperts) -> nn.Module:
        was = experts.replaced.layer
        kind: Any = type(was)
        plain: nn.Module = kind.__new__(kind)
        plain.__dict__.update(was.__dict__)
        plain._buffers, plain._modules = dict(experts._buffers), dict(experts._modules)
        plain._parameters = dict.fromkeys(was._parameters)
        for name, param in was._parameters.items():
            layer = plain._modules.pop(name, None)
            if isinstance(layer, QuantisedLinear):
                turned = tuple(layer.shape) != tuple(param.shape)
                plain._parameters[name] = self._note(f"{path}.{name}", f"{path}.{name}", layer, turned)
            else:
                plain._parameters[name] = experts._parameters[name]
        return plain

    def _note(self, name: str, path: str, layer: QuantisedLinear, is_transposed: bool) -> nn.Parameter:
        """The parameter on meta of a weight that is unpacked."""
        parts = {own: f"{path}.{own}" for own in layer.types}
        weight = PackedWeight(layer, parts, layer.plain_dtype or self._dtype, is_transposed)
        self.weights[name] = weight
        *outer, rows, columns = layer.shape
        shape = (*outer, columns, rows) if is_transposed else layer.shape
        return nn.Parameter(torch.empty(shape, dtype=weight.dtype, device="meta"), requires_grad=False)


def _type_beside(model: nn.Module) -> torch.dtype:
    """The type of the frozen weights that are not packed, in which a library of 8 bits computes."""
    frozen = (p.dtype for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
    return next(frozen, torch.bfloat16)


def _plain_class(kind: type) -> Any:
    """PEFT's class for plain layers, for its class for those of bitsandbytes."""
    module = importlib.import_module(f"{kind.__module__.removesuffix('.bnb')}.layer")
    return getattr(module, kind.__name__.removesuffix("4bit").removesuffix("8bitLt"))
