"""A model with plain bytes in place of what its library keeps quantised weights in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from .layers import Linear4bitBytes, Linear8bitBytes, LinearTorchaoBytes, QuantisedLinear
from .linear_packed import Packing
from .packed import PackedExperts, is_wrapper, packed_layer, require_packed_experts, wrapper_class

BITSANDBYTES = "bitsandbytes.nn.modules"
TENSORS = {
    ("bitsandbytes.nn.modules", "Params4bit"): "bitsandbytes",
    ("bitsandbytes.nn.modules", "Int8Params"): "bitsandbytes",
    ("torchao.utils", "TorchAOBaseTensor"): "torchao",
}


def is_quantised(model: Any) -> bool:
    """Whether a parameter of the model is of a library's class for quantised weights."""
    return isinstance(model, nn.Module) and any(_library_of(p) is not None for p in model.parameters())


def with_bytes(model: nn.Module, packings: Mapping[str, Packing] | None = None) -> nn.Module:
    """The model itself where nothing is quantised; else one that has `QuantisedLinear` in place of quantised layers,
    and of frozen layers whose weights files have packed: `packings` has the form of these by name.

    All other modules, and those of their parts that change, are shared with the model: what one trains, the other has.
    Raises `PlanError` naming a quantised weight that is to be trained, or one of a layer that is not known.
    """
    return _Exchange(packings or {}).twin(model, "") if packings or is_quantised(model) else model


def names_of_bytes(model: nn.Module, of_files: bool | None = None) -> set[str]:
    """The names of the parameters that are bytes of quantised weights. `of_files`: only those that the user's own model
    has plain, or only those of a library's layers."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantisedLinear) and of_files in (None, module.is_of_files)
        for name in module.types
    }


def give_back(model: nn.Module) -> None:
    """Let the library's own layers that were on the meta device have the weights that now are in memory, and plain
    layers whose weights files have packed all else that is trained of them."""
    for module in list(model.modules()):
        if isinstance(module, PackedExperts):
            module.give_back()
        elif isinstance(module, QuantisedLinear):
            layer = module.replaced.layer
            if module.is_of_files or (layer.weight.is_meta and not any(p.is_meta for p in module.parameters())):
                module.give_back(layer)


class _Exchange:
    def __init__(self, packings: Mapping[str, Packing]) -> None:
        self.packings = packings
        self.made: dict[int, nn.Module] = {}

    def twin(self, module: nn.Module, path: str) -> nn.Module:
        if id(module) not in self.made:
            self.made[id(module)] = self._make_twin(module, path)
        return self.made[id(module)]

    def _make_twin(self, module: nn.Module, path: str) -> nn.Module:
        for name, param in module._parameters.items():
            if param is not None and _library_of(param) is not None:
                return self._layer(module, path, name)
        packed = self._packed_layer(module, path)
        if packed is not None:
            return packed
        children = {
            name: None if child is None else self.twin(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()
        }
        if all(new is module._modules[name] for name, new in children.items()):
            return module
        kind: Any = type(module)
        if is_wrapper(module):
            require_packed_experts(children["base_layer"], path)
            kind = wrapper_class(kind)
        twin: nn.Module = kind.__new__(kind)
        twin.__dict__.update(module.__dict__)
        twin.__dict__["_modules"] = children
        for name, value in module.__dict__.items():  # PEFT keeps methods of the model that it adapts
            if isinstance(value, MethodType) and id(value.__self__) in self.made:
                twin.__dict__[name] = MethodType(value.__func__, self.made[id(value.__self__)])
        return twin

    def _packed_layer(self, module: nn.Module, path: str) -> nn.Module | None:
        """The layer that stands for one whose frozen weights are packed, if it is one."""
        names = {name: f"{path}.{name}" if path else name for name in module._parameters}
        own = {name: self.packings[whole] for name, whole in names.items() if whole in self.packings}
        params = [module.get_parameter(name) for name in own]
        stays = own and all(param.is_meta and not param.requires_grad for param in params)
        return packed_layer(module, own) if stays else None

    def _layer(self, module: Any, path: str, name: str) -> nn.Module:
        param = module._parameters[name]
        if param.requires_grad:
            raise PlanError(
                f"model: {path}.{name} is quantised by {_library_of(param)} and asks for a gradient, which 4 or 8 bits "
                f"cannot follow. Freeze it ({path}.{name}.requires_grad_(False)) and train adapters around it "
                "(peft.get_peft_model), or load the model without quantisation"
            )
        if name == "weight" and _is_a(module, BITSANDBYTES, "Linear4bit"):
            self._require_packed(param, path, param.quant_state is not None)
            return Linear4bitBytes(module)
        if name == "weight" and _is_a(module, BITSANDBYTES, "Linear8bitLt"):
            if module.state.has_fp16_weights:
                raise PlanError(
                    f"model: {path} (Linear8bitLt) keeps weights of 16 bits and quantises them in every forward; build "
                    "it with has_fp16_weights=False (load_in_8bit=True does), which keeps 8 bits"
                )
            self._require_packed(param, path, param.dtype == torch.int8)
            return Linear8bitBytes(module)
        if name == "weight" and type(module) is nn.Linear and _library_of(param) == "torchao":
            return LinearTorchaoBytes(module, path)
        raise PlanError(
            f"model: {path}.{name} is quantised by {_library_of(param)} in a {type(module).__name__}; only the weights "
            "of linear layers can be. Leave this module out of the quantisation (llm_int8_skip_modules of "
            "BitsAndBytesConfig, modules_to_not_convert of TorchAoConfig)"
        )

    def _require_packed(self, param: nn.Parameter, path: str, is_packed: bool) -> None:
        if not is_packed and not param.is_meta:
            raise PlanError(
                f"model: {path}.weight is to be quantised, which bitsandbytes does when the layer moves to a device: "
                'call model.to("cpu") or model.to("cuda") first'
            )


def _library_of(param: nn.Parameter) -> str | None:
    places = ((cls.__module__, cls.__qualname__) for cls in type(param).__mro__)
    return next((TENSORS[place] for place in places if place in TENSORS), None)


def _is_a(module: nn.Module, where: str, name: str) -> bool:
    return any((cls.__module__, cls.__qualname__) == (where, name) for cls in type(module).__mro__)
