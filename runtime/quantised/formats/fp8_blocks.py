"""Weights of float8_e4m3fn with an fp32 factor for each block, as DeepSeek-V3 and Qwen3-FP8 are published.

transformers (`Fp8Dequantize`) multiplies in fp32; `weight_scale_inv` is the factor, not its inverse. A block at the
edge of a matrix may be cut. Without `weight_block_size` a matrix has one factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .record import Format, Layout, MatrixShape, PackedTensors, Types, expand_blocks


def _read_options(config: Mapping[str, Any]) -> dict[str, Any]:
    block = config.get("weight_block_size")
    return {"block": None if block is None else [int(size) for size in block]}


def _types(shape: MatrixShape, options: Layout) -> Types:
    block = options["block"]
    scales = (1,) if block is None else tuple(-(-size // each) for size, each in zip(shape, block))
    return {
        "weight": (shape, torch.float8_e4m3fn),
        "weight_scale_inv": (scales, options.get("scale", torch.float32)),
    }


def _unpack(parts: PackedTensors, rows: slice, shape: MatrixShape, options: Layout) -> Tensor:
    weight, scales = parts["weight"][rows].to(torch.float32), parts["weight_scale_inv"]
    factors = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.to(torch.float32)
    if options["block"] is None:
        return weight * factors
    return weight * expand_blocks(factors, rows, shape[1], options["block"])


FP8_BLOCKS = Format(
    "fp8-blocks",
    ("fp8",),
    _read_options,
    _types,
    _unpack,
    scale="weight_scale_inv",
    row_step=lambda options: (options["block"] or [1])[0],
    extras=("activation_scale", "input_scale"),
)
