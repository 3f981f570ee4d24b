"""Frozen bases by name for the command line: the form of the weights under an adapter in storage and on the way.

transformers puts bitsandbytes' layers in; both are optional dependencies, imported when such a base is asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from ...runtime.quantised.libraries import bitsandbytes

BASES = ("bf16", "int8", "nf4")
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
    how = quantisation(base)
    if how is None:
        return model
    from transformers.integrations import replace_with_bnb_linear

    anyhow: Any = model
    heads = [name for name, _ in model.named_children() if name != anyhow.base_model_prefix]
    made: Any = replace_with_bnb_linear(model, heads, how, pre_quantized=False)
    setattr(made, "is_loaded_in_8bit" if base == "int8" else "is_loaded_in_4bit", True)  # as from_pretrained does
    found: nn.Module = made
    return found
