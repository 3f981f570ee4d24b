"""Adapters by text for the command line: "lora:r=16,alpha=32,targets=q_proj+v_proj,dora,rslora".

PEFT puts them on; it is an optional dependency, imported when an adapter is asked for.
"""

from __future__ import annotations

import difflib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError

ALL_LINEAR = "all-linear"
FORM = "lora:r=16,alpha=32,targets=q_proj+v_proj,dora,rslora"
_TASKS = {"causal-lm": "CAUSAL_LM", "classification": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM"}
_FLAGS = ("dora", "rslora")


@dataclass(frozen=True)
class LoraChoice:
    """The value of `--adapter`. Without `alpha` twice `r`; without `targets` PEFT's own for the type of model, or all
    linear layers where it has none."""

    r: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = ()
    dora: bool = False
    rslora: bool = False

    @staticmethod
    def parse(text: str) -> LoraChoice:
        """Raises `PlanError` for another kind than lora, and for options that it does not have."""
        kind, _, rest = text.partition(":")
        if kind.strip().lower() != "lora":
            raise PlanError(f"--adapter {text!r}: allowed is lora with options, such as {FORM}")
        found: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in rest.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key in _FLAGS and not equals:
                found[key] = True
            elif key in ("r", "alpha") and equals:
                found[key] = _number(text, key, value)
            elif key == "targets" and value:
                found[key] = tuple(filter(None, (name.strip() for name in value.split("+"))))
            else:
                raise PlanError(f"--adapter {text!r}: {part!r} is none of its options; it looks like {FORM}")
        return LoraChoice(**found)

    def put_on(self, model: nn.Module, head: str) -> nn.Module:
        """The model with adapters, of which nothing but these, and a new head of a classifier, is trained. Adapters of
        a model on meta are on meta. Raises `PlanError` where PEFT is missing or a target matches no layer."""
        peft = _peft()
        anyhow: Any = model
        targets: Any = list(self.targets) or _usual_targets(peft, anyhow.config.model_type)
        if targets == [ALL_LINEAR]:
            targets = ALL_LINEAR
        else:
            _require_targets(model, targets)
        config = peft.LoraConfig(
            r=self.r,
            lora_alpha=2 * self.r if self.alpha is None else self.alpha,
            target_modules=targets,
            use_dora=self.dora,
            use_rslora=self.rslora,
            task_type=_TASKS.get(head),
            modules_to_save=["classifier"] if head == "image-classification" else None,
        )
        where = next(model.parameters()).device
        with torch.device(where):
            made: nn.Module = peft.get_peft_model(model, config)
        return made


def linear_names(model: nn.Module) -> dict[str, int]:
    """The last parts of the names of layers that LoRA goes on, in the model's order, and how many have each."""
    kinds = ("Linear", "Conv1D")  # the latter is transformers' own, of GPT-2
    found = [name.rpartition(".")[2] for name, module in model.named_modules() if type(module).__name__ in kinds]
    return dict(Counter(found))


def _require_targets(model: nn.Module, targets: list[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    wrong = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if wrong:
        known = linear_names(model)
        close = difflib.get_close_matches(wrong[0], known, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        rows = ", ".join(f"{name} ({count})" for name, count in known.items())
        raise PlanError(
            f"--adapter: targets={wrong[0]} matches no layer; {hint}{type(model).__name__} has the linear layers "
            f"{rows}, and {ALL_LINEAR} stands for all of them but the head"
        )


def _usual_targets(peft: Any, model_type: str) -> list[str]:
    known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type)
    return list(known) if known else [ALL_LINEAR]


def _number(text: str, key: str, value: str) -> float | int:
    try:
        found = int(value) if key == "r" else float(value)
    except ValueError:
        found = 0
    if found <= 0:
        raise PlanError(f"--adapter {text!r}: {key}={value}; allowed is a number above 0, such as {key}=16")
    return found


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise PlanError("--adapter needs peft: pip install 'penstock[adapters]'") from error
    return peft
