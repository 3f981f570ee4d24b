"""Adapters by text for the command line: "lora:r=16,alpha=32,targets=q_proj+v_proj,dora,rslora".

PEFT puts them on. It is an optional dependency: a plan of LoRA's plain factors is made without it (`describe_on`).
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...ir.errors import PlanError
from ...ir.machine.spelling import each_once
from ...runtime.quantised.libraries import is_installed, why_missing
from .lora import CLASSIFIERS, KERNEL_LAYERS, KERNEL_TYPES, TARGETS, unlike_layer, with_lora

ALL_LINEAR = "all-linear"
FORM = "lora:r=16,alpha=32,targets=q_proj+v_proj,dora,rslora"
_TASKS = {
    "causal-lm": "CAUSAL_LM", "classification": "SEQ_CLS", "seq2seq": "SEQ_2_SEQ_LM", "image-text-to-text": "CAUSAL_LM",
}  # fmt: skip
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
            raise PlanError(
                f"--adapter {text!r}: allowed is lora with options, such as {FORM}; other kinds of PEFT are trained "
                "from Python, by peft.get_peft_model and penstock.compile"
            )
        found: list[tuple[str, Any]] = []
        for part in filter(None, (piece.strip() for piece in rest.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key in _FLAGS and not equals:
                found.append((key, True))
            elif key in ("r", "alpha") and equals:
                found.append((key, _number(text, key, value)))
            elif key == "targets" and value:
                found.append((key, tuple(filter(None, (name.strip() for name in value.split("+"))))))
            else:
                raise PlanError(f"--adapter {text!r}: {part!r} is none of its options; it looks like {FORM}")
        return LoraChoice(**each_once(f"--adapter {text!r}", found))

    def put_on(self, model: nn.Module, head: str) -> nn.Module:
        """The model with adapters, of which nothing but these, and a new head of a classifier, is trained. Adapters of
        a model on meta are on meta. Raises `PlanError` where PEFT is missing or a target matches no layer."""
        library = peft()
        config = library.LoraConfig(
            r=self.r,
            lora_alpha=self._alpha,
            target_modules=self._target_names(model) or ALL_LINEAR,
            use_dora=self.dora,
            use_rslora=self.rslora,
            task_type=_TASKS.get(head),
            modules_to_save=[*CLASSIFIERS.get(head, ())] or None,
        )
        where = next(model.parameters()).device
        with torch.device(where):
            made: nn.Module = library.get_peft_model(model, config)
        return made

    def describe_on(self, model: nn.Module, head: str) -> nn.Module:
        """As `put_on` for a model on meta, of which a plan is made, without PEFT: for plain factors alone."""
        with torch.device("meta"):
            return with_lora(model, self._target_names(model), head, self.r, self._scaling)

    def needs_libraries(self, model: nn.Module, head: str, libraries: Sequence[str]) -> bool:
        """Whether a plan needs these libraries: DoRA has more than two factors, and PEFT has adapters of its own for
        layers that are not linear. Raises `PlanError` where one of them is not installed then."""
        unlike = unlike_layer(model, self._target_names(model), head)
        missing = next((name for name in libraries if not is_installed(name)), None) if self.dora or unlike else None
        if missing is not None and self.dora:
            raise PlanError(
                f"--adapter with dora: {missing} is not installed, without which plain LoRA alone is planned: pip "
                "install 'penstock[adapters,bitsandbytes]', or leave dora out"
            )
        if missing is not None:
            raise PlanError(
                f"--adapter: {unlike}, and {missing}, without which only adapters of linear layers are planned, is not "
                "installed: pip install 'penstock[adapters,bitsandbytes]', or name linear layers beside it, such as "
                "targets=q_proj+v_proj"
            )
        return self.dora or bool(unlike)

    @property
    def _alpha(self) -> float:
        return 2 * self.r if self.alpha is None else self.alpha

    @property
    def _scaling(self) -> float:
        return self._alpha / (math.sqrt(self.r) if self.rslora else self.r)

    def _target_names(self, model: Any) -> list[str]:
        """The last parts of the names of layers that have adapters; none: those of all linear layers but the head."""
        kind = getattr(getattr(model, "config", None), "model_type", None)
        names = list(self.targets) or TARGETS.get(kind or "", [])
        if names in ([], [ALL_LINEAR]):
            if kind is None:
                return _linear_paths(model)
            return _names_beside_kernels(model) if kind in KERNEL_TYPES else []
        _require_targets(model, names)
        read = [name for name in names if kind in KERNEL_TYPES and name in KERNEL_LAYERS]
        if read:
            raise PlanError(
                f"--adapter: targets={read[0]}: kernels of {kind} models read the weights of "
                f"{' and '.join(KERNEL_LAYERS)} past an adapter; allowed are {', '.join(_names_beside_kernels(model))}"
            )
        return names


def linear_names(model: nn.Module, heads: bool = True) -> dict[str, int]:
    """The last parts of the names of layers that LoRA goes on, in the model's order, and how many have each. `heads`:
    with those of the model itself, which follow its last layer."""
    paths = [path for path in _linear_paths(model) if heads or "." in path]
    return dict(Counter(path.rpartition(".")[2] for path in paths))


def _linear_paths(model: nn.Module) -> list[str]:
    kinds = ("Linear", "Conv1D", "Linear4bit", "Linear8bitLt", "Linear4bitBytes", "Linear8bitBytes", "PackedLinear")
    return [path for path, module in model.named_modules() if type(module).__name__ in kinds]


def _names_beside_kernels(model: nn.Module) -> list[str]:
    """All linear layers but the head and those that kernels read."""
    return [name for name in linear_names(model, heads=False) if name not in KERNEL_LAYERS]


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


def _number(text: str, key: str, value: str) -> float | int:
    try:
        found = int(value) if key == "r" else float(value)
    except ValueError:
        found = 0
    if not 0 < found < math.inf:
        raise PlanError(f"--adapter {text!r}: {key}={value}; allowed is a number above 0, such as {key}=16")
    return found


def peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise PlanError(f"--adapter needs peft, which is {why_missing('peft', error, 'adapters')}") from error
