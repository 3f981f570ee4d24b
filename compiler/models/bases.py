"""Frozen bases by name for the command line: the form of the weights under an adapter in storage and on the way.

transformers puts bitsandbytes' layers in. Planning has layers of the same bytes in their place, and does without that
optional dependency; `load`, which makes values, needs it. Forms that files have are planned by their records alone, and
trained from such files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from ...runtime.quantised.formats.table import METHODS, format_of, is_ignored
from ...runtime.quantised.layers import Linear4bitBytes, Linear8bitBytes, QuantisedLinear
from ...runtime.quantised.libraries import bitsandbytes
from ...runtime.quantised.linear_packed import Packing
from ...runtime.quantised.model import with_bytes
from ...runtime.quantised.packed import has_matrices_transposed, is_experts

QUANTISED = ("int8", "nf4")
BASES = ("bf16", *QUANTISED)
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
PACKED: dict[str, dict[str, Any]] = {  # the quantization_config of files of this form
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
    },
    "mxfp4": {"quant_method": "mxfp4"},
}
OF_EXPERTS = ("mxfp4",)  # methods that pack experts' matrices alone
_NF4 = {"quant_type": "nf4", "blocksize": 64, "compress_statistics": True, "quant_state": None}
PRECISION = "bf16-true"  # in which everything around the base computes


def require_base(base: str, has_adapter: bool) -> None:
    """Raise `PlanError` for another name, or a base without an adapter: nothing of it is trained."""
    allowed = (*BASES, *PACKED)
    if base not in allowed:
        raise PlanError(f"--base {base!r}; allowed are {', '.join(allowed)}")
    if not has_adapter:
        raise PlanError(
            f"--base {base} without --adapter: a base is frozen, and there is nothing beside it to train; add "
            "--adapter lora:r=16, or leave --base out to train all weights"
        )


def quantisation(base: str) -> Any:
    """The configuration of transformers for a base; None for one that it does not quantise."""
    if base not in QUANTISED:
        return None
    bitsandbytes()
    from transformers import BitsAndBytesConfig

    if base == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def on_base(model: nn.Module, base: str) -> nn.Module:
    """A model on meta with the linear layers of its body quantised; its head stays as it is."""
    if base not in QUANTISED:
        return model
    how = quantisation(base)
    from transformers.integrations import replace_with_bnb_linear

    made: Any = replace_with_bnb_linear(model, _heads(model), how, pre_quantized=False)
    setattr(made, "is_loaded_in_8bit" if base == "int8" else "is_loaded_in_4bit", True)  # as from_pretrained does
    found: nn.Module = made
    return found


def describe_base(model: nn.Module, base: str) -> nn.Module:
    """The model with the bytes of a base in place of its linear layers, as `on_base` and `with_bytes` leave it."""
    if base not in QUANTISED:
        return model
    heads = _heads(model)
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.quantizers_utils import should_convert_module

    for path, module in list(model.named_modules()):
        if (type(module) is nn.Linear or isinstance(module, Conv1D)) and should_convert_module(path, heads):
            model.set_submodule(path, _bytes_of(module.requires_grad_(False), base))
    return model


def packed_config(base: str, config: Any) -> dict[str, Any]:
    """The quantization_config of a base; empty for none. Without a base it is the one that the model is published
    with, if its method is read here."""
    if base:
        return PACKED.get(base, {})
    own = getattr(config, "quantization_config", None)
    return own if isinstance(own, dict) and own.get("quant_method") in {m.partition("/")[0] for m in METHODS} else {}


def on_packed_base(model: nn.Module, config: Mapping[str, Any], name: str, heads: Collection[nn.Module]) -> nn.Module:
    """A model on meta with packed bytes in place of the frozen weights of linear layers and experts; the modules of
    heads stay as they are. Raises `PlanError` where there are no such weights."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    packings: dict[str, Packing] = {}
    for path, module in model.named_modules():
        has_experts = is_experts(module)
        if not (has_experts or type(module) is nn.Linear) or any(module is head for head in heads):
            continue
        if config["quant_method"] in OF_EXPERTS and not has_experts:
            continue
        plain = path.removeprefix("base_model.model.").removesuffix(".base_layer")  # without PEFT
        if is_ignored(config, plain) or not should_convert_module(plain, config.get("modules_to_not_convert")):
            continue
        for leaf, param in module._parameters.items():
            if param is None or param.requires_grad or param.dim() != (3 if has_experts else 2):
                continue
            chosen = format_of(config, plain)
            if chosen is not None:
                shape = tuple(param.transpose(-2, -1).shape if has_matrices_transposed(module) else param.shape)
                packings[f"{path}.{leaf}"] = Packing(chosen[0].name, shape, torch.bfloat16, chosen[1])
    if not packings:
        what = "matrices of experts" if config["quant_method"] in OF_EXPERTS else "linear layers"
        raise PlanError(
            f"--base {name}: packs {what}, and {type(model).__name__} has none; {', '.join(BASES)} and fp8 are of "
            "linear layers"
        )
    return with_bytes(model, packings)


def modules_of_heads(model: Any) -> list[nn.Module]:
    """The modules of a model beside its body."""
    return [module for name in _heads(model) for module in model.get_submodule(name).modules()]


def _heads(model: Any) -> list[str]:
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def _bytes_of(layer: Any, base: str) -> QuantisedLinear:
    """The bytes of a linear layer on meta, which is given the fields that the library's has."""
    is_plain = type(layer) is nn.Linear
    layer.out_features, layer.in_features = layer.weight.shape if is_plain else reversed(layer.weight.shape)
    layer.source_cls = type(layer)
    if base == "int8":
        layer.state, layer.weight.SCB = SimpleNamespace(threshold=6.0, SCB=None), None
        return Linear8bitBytes(layer)
    layer.compute_dtype = torch.bfloat16
    for name, value in _NF4.items():
        setattr(layer.weight, name, value)
    return Linear4bitBytes(layer)
