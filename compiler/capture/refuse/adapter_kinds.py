"""Adapters of PEFT whose training no program can repeat, by their kind and its options: the reason and a way out.

A kind that is not in the table is captured as any other model, or refused by the line that cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ....ir.errors import CaptureError


@dataclass(frozen=True)
class Refusal:
    """kind: PEFT's name. option: of its configuration; "" for the kind itself. applies: whether a value of the option
    is refused."""

    kind: str
    option: str
    why: str
    instead: str
    applies: Callable[[Any], bool] = bool


_LAYERS = "its value decides whether Python calls a layer at all"
REFUSALS = (
    Refusal("ADAMSS", "use_asa", "its masks are made of gradients, which stay on the devices", "use_asa=False"),
    Refusal("BOFT", "boft_dropout", "Python reads the draw that chooses a matrix", "boft_dropout=0"),
    Refusal("CPT", "", "its forward writes a projection into the weights that it trains", "PROMPT_TUNING"),
    Refusal("FROD", "", "its forward reads the sizes of sparse matrices from tensors", "VERA or RANDLORA"),
    Refusal("LOHA", "module_dropout", _LAYERS, "module_dropout=0, or rank_dropout"),
    Refusal("LOKR", "module_dropout", _LAYERS, "module_dropout=0, or rank_dropout"),
    Refusal("LORA", "alora_invocation_tokens", "it looks for tokens in each batch", "LoRA without them"),
    Refusal("LORA", "arrow_config", "it chooses among adapters by what the batch holds", "LoRA without it"),
    Refusal("LORA", "monteclora_config", "it draws from a store of samples in Python", "LoRA without it, or PVERA"),
    Refusal(
        "LORA", "velora_config", "Python asks for a norm of each batch",
        'VeloraConfig(init_type="random")', lambda value: value is not None and value.init_type != "random",
    ),
    Refusal("OFT", "coft", "its forward writes a projection into the weights that it trains", "coft=False"),
    Refusal("OSF", "", "hooks project its gradients by products of matrices", 'LORA with init_lora_weights="mica"'),
)  # fmt: skip


def require_trainable_adapters(model: nn.Module) -> None:
    """Raise `CaptureError`, before forward runs, for adapters that no program can train."""
    for name, config in _configs(model):
        kind = getattr(config.peft_type, "value", config.peft_type)
        for each in REFUSALS:
            value = getattr(config, each.option, None) if each.option else True
            if kind == each.kind and each.applies(value):
                what = f"{kind} with {each.option}={value!r}" if each.option else kind
                raise CaptureError(
                    f"the adapter {name!r} is of the kind {what}, which is not trained here: {each.why}. "
                    f"The nearest that is: {each.instead}"
                )


def _configs(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for module in model.modules():
        for attribute in ("peft_config", "_peft_config"):
            found = vars(module).get(attribute)
            if isinstance(found, dict):
                yield from found.items()
