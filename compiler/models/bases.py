"""Frozen bases by name for the command line: the form of the weights under an adapter in storage and on the way.

transformers puts bitsandbytes' layers in. Planning has layers of the same bytes in their place, and does without that
optional dependency; `load`, which makes values, needs it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from ...runtime.quantised.layers import Linear4bitBytes, Linear8bitBytes, QuantisedLinear
from ...runtime.quantised.libraries import bitsandbytes

QUANTISED = ("int8", "nf4")
BASES = ("bf16", *QUANTISED)
_NF4 = {"quant_type": "nf4", "blocksize": 64, "compress_statistics": True, "quant_state": None}
PRECISION = "bf16-true"  # in which everything around the base computes


def require_base(base: str, has_adapter: bool) -> None:
    """Raise `PlanError` for another name, or a base without an adapter: nothing of it is trained."""
    if base not in BASES:
        raise PlanError(f"--base {base!r}; allowed are {', '.join(BASES)}")
    if not has_adapter:
        raise PlanError(
            f"--base {base} without --adapter: a base is frozen, and there is nothing beside it to train; add "
            "--adapter lora:r=16, or leave --base out to train all weights"
        )


def quantisation(base: str) -> Any:
    """The configuration of transformers for a base; None for one that is not quantised."""
    if base == "bf16":
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
