"""All formats by name, and the format that a `quantization_config` of config.json gives to a layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ....ir.errors import CheckpointError
from .awq import AWQ
from .compressed import INT_PACKED, SCALED
from .fp4 import MXFP4, NVFP4
from .fp8_blocks import FP8_BLOCKS
from .gptq import GPTQ
from .record import Format

FORMATS = {record.name: record for record in (MXFP4, NVFP4, FP8_BLOCKS, GPTQ, AWQ, INT_PACKED, SCALED)}
METHODS = {method: record for record in FORMATS.values() for method in record.methods}
COMPRESSED = "compressed-tensors"


def format_of(config: Mapping[str, Any], layer: str) -> tuple[Format, dict[str, Any]] | None:
    """The format of a layer's weight, by its name in files, and the options of its layout; None where the config leaves
    the layer as it is. Raises `CheckpointError` for a method or a layout that is not read here."""
    method = str(config.get("quant_method", ""))
    if method == COMPRESSED:
        group = _group(config, layer)
        if group is None:
            return None
        if (config.get("transform_config") or {}).get("config_groups"):
            raise CheckpointError(
                "quantization_config: transform_config rotates inputs of layers, which is not done here; give weights "
                "without it, or weights that are not quantised"
            )
        form = str(group.get("format") or config.get("format") or "")
        method, config = f"{method}/{form}", group.get("weights") or {}
    record = METHODS.get(method)
    if record is None:
        raise CheckpointError(
            f"quantization_config: quant_method {method!r} is not read here; known are {', '.join(sorted(METHODS))}, "
            "and bitsandbytes and torchao where the model has their layers. Give weights of one of these, or weights "
            "that are not quantised"
        )
    return record, record.read_options(config)


def form_of(config: Mapping[str, Any]) -> str:
    """The name of a quantization_config's form in `METHODS`; of compressed-tensors with the form of its groups."""
    method = str(config.get("quant_method", ""))
    if method != COMPRESSED:
        return method
    groups = [group for group in config.get("config_groups", {}).values() if isinstance(group, Mapping)]
    forms = {str(group.get("format") or config.get("format") or "") for group in groups}
    return f"{method}/{', '.join(sorted(forms))}"


def is_ignored(config: Mapping[str, Any], layer: str) -> bool:
    """Whether a config of compressed-tensors says of a layer that it is not packed. Where there are files, these say so
    themselves."""
    return any(_rank(each, layer) is not None for each in config.get("ignore") or ())


def _group(config: Mapping[str, Any], layer: str) -> Mapping[str, Any] | None:
    """The group of a config of compressed-tensors that a layer is of: names come before patterns, these before
    classes."""
    groups = [group for group in config.get("config_groups", {}).values() if isinstance(group, Mapping)]
    found = [(_rank(target, layer), i) for i, group in enumerate(groups) for target in group.get("targets") or ()]
    best = min(((rank, i) for rank, i in found if rank is not None), default=None)
    return None if best is None else groups[best[1]]


def _rank(target: str, layer: str) -> int | None:
    if target == layer:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], layer) else None
    return 2 if target == "Linear" else None
