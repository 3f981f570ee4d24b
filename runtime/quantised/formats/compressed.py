"""Weights of compressed-tensors with scales for a tensor, a row, a group of columns or a block: integers of 4 and 8
bits that 32 bits hold ("pack-quantized"), and int8 or float8_e4m3fn as they are ("int-quantized", "float-quantized").

The library computes `(weight - zero point) * scale` in the type of the scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .record import (
    Format,
    Layout,
    MatrixShape,
    PackedTensors,
    Types,
    expand_blocks,
    expand_groups,
    group_size,
    nibbles,
    number_of_groups,
    require,
)

EXTRAS = ("weight_shape", "input_scale", "input_zero_point", "weight_zero_point")


def _read_options(config: Mapping[str, Any], strategies: tuple[str, ...]) -> dict[str, Any]:
    require(config, "actorder", (None, False, "static", "weight"))  # others have an index beside
    strategy = require(config, "strategy", strategies)
    found = {"strategy": strategy, "symmetric": bool(config.get("symmetric", True))}
    if strategy == "group":
        found["group_size"] = group_size(config)
    if strategy == "block":
        found["block"] = [int(size) for size in config["block_structure"]]
    return found


def _packed_options(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "type", ("int",), "int")
    return {"bits": require(config, "num_bits", (4, 8)), **_read_options(config, ("group", "channel"))}


def _plain_options(config: Mapping[str, Any]) -> dict[str, Any]:
    require(config, "num_bits", (8,))
    kind = require(config, "type", ("int", "float"), "int")
    return {"kind": kind, **_read_options(config, ("tensor", "channel", "group", "block"))}


def _shape_of_scales(shape: MatrixShape, options: Layout) -> MatrixShape:
    rows, columns = shape
    if options["strategy"] == "tensor":
        return (1,)
    if options["strategy"] == "block":
        return tuple(-(-size // each) for size, each in zip(shape, options["block"]))
    return (rows, number_of_groups(columns, options.get("group_size", -1)))


def _packed_types(shape: MatrixShape, options: Layout) -> Types:
    (rows, columns), bits, scales = shape, options["bits"], _shape_of_scales(shape, options)
    found: Types = {
        "weight_packed": ((rows, -(-columns * bits // 32)), torch.int32),
        "weight_scale": (scales, options.get("scale", torch.bfloat16)),
    }
    if not options["symmetric"]:
        found["weight_zero_point"] = ((-(-rows * bits // 32), scales[1]), torch.int32)
    return found


def _plain_types(shape: MatrixShape, options: Layout) -> Types:
    dtype, scales = _dtype(options), _shape_of_scales(shape, options)
    found: Types = {"weight": (shape, dtype), "weight_scale": (scales, options.get("scale", torch.bfloat16))}
    if not options["symmetric"]:
        found["weight_zero_point"] = (scales, dtype)
    return found


def _packed_unpack(parts: PackedTensors, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    bits, scales, size = options["bits"], parts["weight_scale"][rows], options.get("group_size", -1)
    weight: Tensor = _numbers(parts["weight_packed"][rows], bits)[:, : shape[1]].to(scales.dtype)
    if "weight_zero_point" in parts:
        zeros = _numbers(parts["weight_zero_point"].t(), bits)[:, rows].t()
        return (weight - expand_groups(zeros.to(scales.dtype), shape[1], size)) * expand_groups(scales, shape[1], size)
    return weight * expand_groups(scales, shape[1], size)


def _plain_unpack(parts: PackedTensors, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    scales = _scales_of_rows(parts["weight_scale"], rows, shape, options)
    weight: Tensor = parts["weight"][rows].to(scales.dtype)
    if "weight_zero_point" in parts:
        weight -= _scales_of_rows(parts["weight_zero_point"].to(scales.dtype), rows, shape, options)
    return weight * scales


def _scales_of_rows(scales: Tensor, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    """Scales, or zero points, of these rows, that multiply their columns."""
    if options["strategy"] == "tensor":
        return scales.reshape(1, 1)
    if options["strategy"] == "block":
        return expand_blocks(scales, rows, shape[1], options["block"])
    return expand_groups(scales[rows], shape[1], options.get("group_size", -1))


def _numbers(words: Tensor, bits: int) -> Tensor:
    """Signed: files have them plus half of their range."""
    small = nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8)
    return small.to(torch.int16) - (1 << bits - 1)


def _dtype(options: Layout) -> torch.dtype:
    return torch.int8 if options["kind"] == "int" else torch.float8_e4m3fn


INT_PACKED = Format(
    "int-packed",
    ("compressed-tensors/pack-quantized",),
    _packed_options,
    _packed_types,
    _packed_unpack,
    scale="weight_scale",
    extras=EXTRAS,
)
SCALED = Format(
    "scaled",
    tuple(f"compressed-tensors/{name}-quantized" for name in ("int", "float", "naive")),
    _plain_options,
    _plain_types,
    _plain_unpack,
    scale="weight_scale",
    row_step=lambda options: int(options.get("block", [1])[0]),
    extras=EXTRAS,
)
