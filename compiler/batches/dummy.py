"""The batch that a model brings itself, for `compile` without one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...ir.errors import PlanError

_OF_ROWS = ("SequenceClassification", "ImageClassification", "AudioClassification")  # a class for each row
_OF_TOKENS = ("TokenClassification",)
_BOTH_FORMS = (
    "pass one global batch, as `step` will take it: compile(model, hardware, batch); or its shapes alone: "
    'compile(model, hardware, {"input_ids": {"shape": [8, 128], "dtype": "int64"}, ...})'
)


def dummy_batch(model: nn.Module, needs_labels: bool) -> dict[str, Tensor]:
    """The `dummy_inputs` of a transformers model, with labels where its loss needs them, and a warning that says so.

    Raises `PlanError` for a model without them, or whose forward takes another input first (ViT, Whisper).
    """
    given, main = getattr(model, "dummy_inputs", None), getattr(model, "main_input_name", "")
    if not isinstance(given, Mapping) or main not in given:
        raise PlanError(f"example_inputs: none given, and {type(model).__name__} brings no dummy_inputs; {_BOTH_FORMS}")
    found = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if needs_labels:
        found |= _labels(model, found)
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in found.items())
    warnings.warn(
        f"no example_inputs: planned with the model's own dummy_inputs ({shapes}), the only batch that step will take; "
        "for yours: compile(model, hardware, batch)",
        stacklevel=6,
    )
    return found


def _labels(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known, kind = inspect.signature(model.forward).parameters, type(model).__name__
    tokens = inputs.get("decoder_input_ids", next(iter(inputs.values())))
    classes = torch.zeros(len(tokens), dtype=torch.int64)
    if "start_positions" in known and "labels" not in known:
        return {"start_positions": classes, "end_positions": classes.clone()}
    if "labels" not in known or "labels" in inputs:
        return {}
    if kind.endswith(_OF_ROWS):
        return {"labels": classes}
    return {"labels": torch.zeros_like(tokens) if kind.endswith(_OF_TOKENS) else tokens.clone()}
