"""The layers of LoRA as PEFT would put them on a model on meta: the same names, parameters and calls.

A plan needs no more of them, so PEFT is neither needed nor imported for one, which takes seconds. A test holds these
layers to PEFT's own.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from ...runtime.quantised.layers import Linear4bitBytes, QuantisedLinear

CLASSIFIERS = {"classification": ("classifier", "score"), "image-classification": ("classifier",)}  # trained as a copy
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}  # PEFT's names of parts of all experts
_TARGETS = {  # in PEFT's words: the layers that have adapters where a type of model is named and no layer
    "q_proj v_proj": "bart opt gpt_neo gptj llama llama4 mistral mixtral stablelm gemma gemma2 gemma3_text qwen2 qwen3",
    "q v": "t5 mt5",
    "query value": "bert roberta xlm-roberta electra layoutlm",
    "c_attn": "gpt2 gpt_bigcode",
    "query_key_value": "bloom gpt_neox chatglm falcon RefinedWeb RefinedWebModel",
    "q v q_proj v_proj": "blip-2",
    "q_proj v_proj fc1 fc2": "phi",
    "q_proj k_proj v_proj o_proj": "nemotron_h",
    "query_proj value_proj": "deberta-v2",
    "in_proj": "deberta",
    "Wqkv": "mpt",
    "c_proj c_attn": "btlm",
    "qkv_proj": "codegen",
    "key value receptance output": "rwkv",
    "r_proj k_proj v_proj o_proj key value": "rwkv7",
}
TARGETS = {model_type: names.split() for names, types in _TARGETS.items() for model_type in types.split()}
# Types whose kernels read the weights of these layers themselves, so that PEFT refuses adapters beside them.
KERNEL_TYPES, KERNEL_LAYERS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"), ("out_proj", "conv1d")


class LoraModel(nn.Module):
    """A model on meta with adapters in it, under the name that PEFT has for it."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model
        self.config: Any = getattr(model, "config", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self.base_model.model
        return model(*args, **kwargs)


class LoraLinear(nn.Module):
    """A frozen linear layer and the two factors beside it, in the order of PEFT's calls."""

    def __init__(self, layer: Any, r: int, scaling: float):
        super().__init__()
        rows, columns = layer.shape if isinstance(layer, QuantisedLinear) else layer.weight.shape
        if _is_conv1d(layer):
            rows, columns = columns, rows
        self.base_layer, self.scaling = layer, scaling
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(columns, r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(r, rows, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        parts: tuple[Any, ...] = self.base_layer, *(m["default"] for m in (self.lora_A, self.lora_B, self.lora_dropout))
        base_layer, lora_A, lora_B, dropout = parts
        result: Tensor = base_layer(x)
        if isinstance(self.base_layer, Linear4bitBytes):
            result = result.clone()
        result_dtype = result.dtype
        is_quantised = isinstance(self.base_layer, QuantisedLinear) and not self.base_layer.is_of_files
        scaling = self.scaling
        if not (is_quantised and torch.is_autocast_enabled()) and x.dtype != lora_A.weight.dtype:
            x = x.to(dtype=lora_A.weight.dtype)
        if not is_quantised:
            result = result + lora_B(lora_A(dropout(x))) * scaling
            return result.to(result_dtype)
        output = lora_B(lora_A(dropout(x))) * scaling
        if not torch.is_autocast_enabled():
            output = output.to(result_dtype)
        result = result + output
        return result


class TrainedCopy(nn.Module):
    """A module and the copy of it that is trained in its place."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.original_module = module
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(module).requires_grad_(True)})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.modules_to_save["default"](*args, **kwargs)


def with_lora(model: Any, targets: Collection[str], head: str, r: int, scaling: float) -> LoraModel:
    """The model with adapters around the layers whose names end in `targets`, all linear ones but the head where these
    are empty, and trained copies of a classifier. `unlike_layer` must have found none."""
    saved = CLASSIFIERS.get(head, ())
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    model.requires_grad_(False)
    for path, module in list(model.named_modules())[1:]:
        if any(path.endswith(name) for name in saved):
            model.set_submodule(path, TrainedCopy(module))
        if set(path.split(".")) & set(saved):
            continue
        if _is_linear(module) and module is not output if not targets else _has_name(path, targets):
            model.set_submodule(path, LoraLinear(module, r, scaling))
    return LoraModel(model)


def unlike_layer(model: nn.Module, targets: Collection[str], head: str) -> str:
    """The first layer of the targets that takes other adapters than two plain factors, and its class; "" for none."""
    saved = {*CLASSIFIERS.get(head, ())}
    for path, module in list(model.named_modules())[1:]:
        has_experts = any(p.dim() == 3 for name, p in module.named_parameters(recurse=False) if name == "gate_up_proj")
        is_chosen = has_experts and (not targets or _OF_EXPERTS & {*targets})
        is_other = _has_name(path, targets) and not _is_linear(module)
        if (is_chosen or is_other) and not saved & {*path.split(".")}:
            return f"{path} is a {type(module).__name__}"
    return ""


def _has_name(path: str, names: Collection[str]) -> bool:
    return any(f".{path}".endswith(f".{name}") for name in names)


def _is_linear(module: nn.Module) -> bool:
    is_packed = isinstance(module, QuantisedLinear) and len(module.shape) == 2  # and no experts
    return isinstance(module, nn.Linear) or is_packed or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"  # transformers' own, of GPT-2
