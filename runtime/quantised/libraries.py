"""The libraries whose own functions unpack quantised weights, imported when the first one is unpacked."""

from __future__ import annotations

import importlib
from typing import Any

from ...ir.errors import PlanError


def bitsandbytes() -> Any:
    return _library("bitsandbytes")


def torchao() -> Any:
    """The part of torchao that has the classes of quantised tensors."""
    return _library("torchao", "quantization")


def _library(name: str, part: str = "") -> Any:
    try:
        return importlib.import_module(f"{name}.{part}" if part else name)
    except ImportError as error:
        raise PlanError(
            f"model: its weights are quantised by {name}, which unpacks them and is not installed here ({error}): "
            f"pip install 'penstock[{name}]'"
        ) from error
